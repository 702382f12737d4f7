// The tokens of one step as a heat map: probability, action mask, advantage, and importance ratio. Context tokens are
// grey: they are not trained on.
(() => {
  const { el } = RK;
  const SHOWN = 60; // context tokens shown at first
  const LEVELS = [0.9, 0.5, 0.2, 0.05]; // smallest probability of each colour
  const LEAST_SPREAD = Math.log(1.2); // of ratios: smaller changes must not look large
  const choice = { key: "logprob" }; // kept from step to step
  const largest = (values, least) => values.reduce((most, value) => Math.max(most, Math.abs(value)), least);

  const isNumber = (value) => typeof value === "number";
  const level = (logprob) => {
    if (!isNumber(logprob)) return "heat-none";
    const place = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
    return `rare-${place < 0 ? LEVELS.length : place}`;
  };
  const all = (episode, key) => episode.tokens.steps.flatMap((row) => row[key] ?? []).filter(isNumber);

  // The views, each with the value, colour and figure of a token, and a legend.
  const kinds = (episode) => {
    const advantage = (row, place) => row.advantages?.[place] ?? episode.steps[row.step]?.A ?? null;
    const worth = largest([...all(episode, "advantages"), ...episode.steps.map((step) => step.A).filter(isNumber)], 1e-9);
    const spread = largest(all(episode, "ratios").filter((ratio) => ratio > 0).map(Math.log), LEAST_SPREAD);
    const ratioLevel = (ratio) => RK.heat(isNumber(ratio) && ratio > 0 ? Math.log(ratio) : null, spread);
    return [
      {
        key: "logprob", name: "log-probability", value: (row, place) => row.logprobs[place], colour: level, figure: (x) => RK.signed(x, 2),
        legend: LEVELS.map((least, place) => [`rare-${place}`, `p ≥ ${least}`]).concat([["rare-4", `p < ${LEVELS[3]}`]]),
        missing: "The policy recorded no log-probabilities.",
      },
      {
        key: "mask", name: "action mask", value: () => 1, colour: (x) => `mask-${x}`, figure: String, ofContext: 0,
        legend: [["mask-1", "1: sampled, trained on"], ["mask-0", "0: context"]],
      },
      {
        key: "advantage", name: "advantage", value: advantage, colour: (x) => RK.heat(x, worth), figure: (x) => RK.signed(x, 2),
        legend: [["heat-m4", RK.signed(-worth, 2)], ["heat-0", "0"], ["heat-p4", RK.signed(worth, 2)]],
        missing: "The steps have no credit; run `reward-kit credit RUN`.",
      },
      {
        key: "ratio", name: "importance ratio", value: (row, place) => row.ratios?.[place] ?? null, colour: ratioLevel,
        figure: (x) => (isNumber(x) ? `×${x.toFixed(x < 10 ? 3 : 1)}` : RK.DASH),
        legend: [["heat-m4", `×${Math.exp(-spread).toFixed(2)}`], ["heat-0", "×1"], ["heat-p4", `×${Math.exp(spread).toFixed(2)}`]],
        missing: "No ratios: only training runs with `logs.episodes_every` log them.",
      },
    ];
  };

  // The text of a token with visible spaces and line breaks.
  const written = (episode, id) => {
    const text = episode.tokens.texts?.[id];
    if (text === undefined || text === null) return `[${id}]`;
    return text === "" ? "∅" : RK.shown(text, 80).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)).replace(/\n/g, "↵").replace(/\t/g, "⇥");
  };

  const told = (episode, row, place, known) => {
    const lines = [`${written(episode, row.ids[place])}, id ${row.ids[place]}, sampled in step ${row.step}`];
    for (const kind of known) {
      if (kind.key !== "mask") lines.push(`${kind.name} ${kind.figure(kind.value(row, place))}`);
    }
    if (isNumber(row.logprobs[place])) lines.push(`probability ${Math.exp(row.logprobs[place]).toPrecision(3)}`);
    if (row.choices?.[place]) lines.push(`chosen among ${RK.count(row.choices[place])} token${row.choices[place] === 1 ? "" : "s"}`);
    return lines.join("; ");
  };

  const token = (text, figure, colour, title) => el("span", { class: `token ${colour}`, role: "listitem", title, "aria-label": title },
    el("span", { class: "token-text stranger", dir: "auto" }, text), el("span", { class: "token-figure" }, figure));

  const context = (episode, row, kind, from) => row.context.slice(from).map((id) => {
    const text = written(episode, id);
    return token(text, kind.ofContext === undefined ? "" : kind.figure(kind.ofContext), kind.ofContext === undefined ? "seen" : kind.colour(kind.ofContext),
      `${text}, id ${id}, context`);
  });

  const sampled = (episode, row, kind, known) => row.ids.map((id, place) => {
    const value = kind.value(row, place);
    return token(written(episode, id), kind.figure(value), kind.colour(value), told(episode, row, place, known));
  });

  const facts = (row) => {
    const known = row.logprobs.filter(isNumber);
    const seen = row.context.length + row.cut;
    const parts = [`${RK.count(row.ids.length)} token${row.ids.length === 1 ? "" : "s"} sampled, after ${RK.count(seen)} new context token${seen === 1 ? "" : "s"}`];
    if (known.length) {
      const sum = known.reduce((one, other) => one + other, 0);
      parts.push(`total log-probability ${RK.signed(sum)}, probability ${Math.exp(sum).toPrecision(3)}`);
    }
    if (isNumber(row.version)) parts.push(`weights version ${row.version}`);
    if (row.reason) parts.push(`new segment: ${row.reason}`);
    return el("p", { class: "faint stranger" }, `${parts.join("; ")}.`);
  };

  const draw = (container, episode, row) => {
    const known = kinds(episode);
    const kind = known.find((one) => one.key === choice.key) ?? known[0];
    const isThere = (one) => row.ids.some((_, place) => isNumber(one.value(row, place)));
    const pick = (one) => el("label", null, el("input", {
      type: "radio", name: "token-kind", value: one.key, checked: one === kind, onchange: () => {
        choice.key = one.key;
        draw(container, episode, row);
        container.querySelector("input:checked").focus();
      },
    }), one.name);
    const begin = Math.max(0, row.context.length - SHOWN);
    const list = el("div", { class: "token-list", role: "list", "aria-label": "tokens of this step" });
    const fill = (from) => list.replaceChildren(...context(episode, row, kind, from), ...sampled(episode, row, kind, known));
    fill(begin);
    const hidden = begin + row.cut;
    const more = begin ? el("button", { type: "button", onclick: (event) => { fill(0); event.target.remove(); } }, `show ${RK.count(begin)} more`) : null;
    container.replaceChildren(el("div", { class: "tokens" },
      el("fieldset", { class: "token-kinds" }, el("legend", null, "Tokens, coloured by"), known.map(pick)),
      isThere(kind) || !row.ids.length ? el("ul", { class: "token-legend" }, kind.legend.map(([colour, name]) => el("li", null, el("span", { class: `token-key ${colour}` }), name)),
        kind.key === "mask" ? null : el("li", null, el("span", { class: "token-key seen" }), "context, not sampled")) : el("p", { class: "faint" }, kind.missing),
      hidden ? el("p", { class: "faint" }, `${RK.count(hidden)} earlier context tokens are hidden. `, more) : null,
      list, facts(row)));
  };

  RK.tokens = (container, episode, stepIndex) => {
    if (!episode.tokens?.steps) return container.replaceChildren();
    const row = episode.tokens.steps.find((one) => one.step === stepIndex);
    if (episode.tokens.damaged) return container.replaceChildren(el("p", { class: "faint stranger" }, `The recorded tokens cannot be read: ${episode.tokens.damaged}`));
    if (!row) return container.replaceChildren(el("p", { class: "faint" }, "No tokens were recorded for this step."));
    return draw(container, episode, row);
  };
})();
