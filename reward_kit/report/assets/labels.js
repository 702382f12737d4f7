// The user's label and note of an episode or step: editable in the viewer, else shown.
(() => {
  const { el } = RK;

  // Labels of an episode by step; "episode" is the key of the episode itself.
  const labelsOf = async (id) => {
    if (RK.readLabels) return RK.readLabels(id);
    return Object.hasOwn(RK.data.labels ?? {}, id) ? RK.data.labels[id] : {};
  };

  const fixed = (box, label) => {
    box.hidden = !label;
    if (!label) return;
    box.append(
      el("strong", null, label.value === null ? "note" : `label: ${label.value}`),
      label.note ? el("div", { class: "said stranger", dir: "auto" }, label.note) : "",
    );
  };

  const editable = (box, label, save) => {
    const isNumber = typeof label?.value === "number";
    const status = el("span", { role: "status", class: "faint" });
    const note = el("textarea", { rows: 2, maxlength: 10000 }, label?.note ?? "");
    const score = el("input", { type: "number", step: "any", value: isNumber ? label.value : null });
    const state = { value: label?.value ?? null };
    const buttons = ["pass", "fail"].map((word) => el("button", { type: "button", onclick: () => set(state.value === word ? null : word) }, word));
    const draw = () => {
      for (const button of buttons) button.setAttribute("aria-pressed", button.textContent === state.value);
      if (typeof state.value !== "number") score.value = "";
    };
    const store = async () => {
      draw();
      status.className = "faint";
      status.textContent = "saving …";
      try {
        await save({ label: state.value, note: note.value });
        status.textContent = "saved";
      } catch (error) {
        status.className = "bad stranger";
        status.textContent = `not saved: ${RK.shown(error.message, 400)}`;
      }
    };
    const set = (value) => {
      state.value = value;
      store();
    };
    score.addEventListener("change", () => set(Number.isFinite(score.valueAsNumber) ? score.valueAsNumber : null));
    note.addEventListener("change", store);
    draw();
    const controls = [el("strong", null, "label"), buttons, el("label", null, "score ", score), status];
    box.append(el("div", { class: "label-row" }, controls), el("label", { class: "label-note" }, "note", note));
  };

  // A box for the label of an episode, or of one of its steps; it is filled when the labels are known.
  RK.labelBox = (episode, step) => {
    const key = step === undefined ? "episode" : String(step);
    const of = step === undefined ? "Label of this episode" : `Label of step ${step}`;
    const box = el("section", { class: "label-box", "aria-label": of, hidden: true });
    const save = (label) => RK.saveLabel({ rollout_id: episode.id, step: step ?? null, ...label });
    const fill = (labels) => {
      box.hidden = false;
      if (RK.saveLabel) editable(box, labels[key], save);
      else fixed(box, labels[key]);
    };
    labelsOf(episode.id).then(fill, () => {});
    return box;
  };
})();
