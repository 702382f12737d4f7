// The panel of a group's diagram: its scale, the figures of one step, the actions in its state, and a text description.
(() => {
  const STATE = 800; // displayed characters of a state
  const LISTED = 8; // episodes named for one action
  const CROSSROADS = 12; // states in the text description
  const LEVELS = [-4, -3, -2, -1, 0, 1, 2, 3, 4];
  const NUMBERS = [
    ["reward", "reward", "of this step"], ["ret", "G", "return from this step on"], ["A_E", "A_E", "the episode compared with its group"],
    ["A_S", "A_S", "the step compared with others in its state"], ["A", "A", "advantage, both combined"],
    ["peer", "peers", "undiscounted return compared with the other episodes in this state"],
  ];
  // An action as a call with one argument, in Python or JSON syntax.
  const CALL = /^([\w.-]+)\(([\w.-]+)=(?:"(.*)"|'(.*)'|([^,"']*))\)$/s;

  // The observation before a step: the text of the state if any, else the last message.
  RK.stateText = (episode, step) => {
    const before = (episode.messages ?? []).filter((message) => message.step === step && message.role !== "assistant");
    return before.at(-1)?.text || episode.steps[step].key_text;
  };

  // The number of an episode in its whole group, from 1.
  RK.numberOf = (group, episode) => (group.first ?? 0) + episode + 1;

  // A number without trailing zeros.
  RK.short = (x) => String(Number(Math.abs(x) < 1000 ? x.toFixed(3) : x.toPrecision(6))).replace("-", "−");

  RK.scoreText = ({ score }) => (typeof score === "number" ? RK.short(score) : "unscored");

  // The actions of a group, [episode][step], without their common parts: `act(command="look")` is `look`.
  RK.actionNames = (group) => {
    const all = group.episodes.map((one) => one.steps.map((step) => step.action ?? ""));
    const parts = all.map((actions) => actions.map((text) => CALL.exec(text)));
    const heads = new Set(parts.flat().map((found) => found && `${found[1]} ${found[2]}`));
    if (heads.size !== 1 || heads.has(null)) return all;
    return parts.map((row) => row.map((found) => (found[3] ?? found[4] ?? found[5]).replace(/\\(["'\\])/g, "$1").replace(/\\n/g, " ")));
  };

  // The path of a sign in a cell, around 0,0.
  RK.signPath = (value) => {
    if (typeof value !== "number") return "";
    return value > 0 ? "M-3.2,0H3.2M0,-3.2V3.2" : value < 0 ? "M-3.2,0H3.2" : "M-.5,0H.5";
  };

  // One coloured SVG box with its sign.
  RK.heatBox = (value, scale, box) => [
    RK.svg("rect", { class: `box ${RK.heat(value, scale)}`, ...box, rx: 4 }),
    RK.svg("path", {
      class: `sign ${RK.heat(value, scale)}`, d: RK.signPath(value),
      transform: `translate(${box.x + box.width / 2},${box.y + box.height / 2})`,
    }),
  ];

  // The caption: how to read the diagram.
  RK.treeCaption = (group) => {
    const size = group.size ?? group.episodes.length;
    const mean = typeof group.baseline === "number" ? `, mean score ${RK.short(group.baseline)}` : "";
    return RK.el("p", { class: "faint tree-caption" }, `${RK.count(size)} episode${size === 1 ? "" : "s"} from one start${mean}. `,
      "A lane is an episode, a cell a step",
      group.is_tied ? ". " : ": + and blue where it did better than the others, − and orange where it did worse. ",
      "Steps in one frame were taken in the same state. Each lane ends with its score and episode number.");
  };

  // The colour scale from -`most` to `most`.
  RK.treeScale = (most, field) => {
    const told = `nine colours from ${RK.signed(-most, 2)}, marked with a minus, to ${RK.signed(most, 2)}, marked with a plus`;
    const bar = RK.svg("svg", { viewBox: "0 0 190 32", width: 190, height: 32, role: "img", "aria-label": told });
    LEVELS.forEach((level, place) => {
      const box = { x: place * 21 + 1, y: 1, width: 19, height: 14 };
      bar.append(RK.svg("g", { class: "cell" }, RK.heatBox((level * most) / 4, most, box)));
    });
    const write = (x, anchor, text) => bar.append(RK.svg("text", { x, y: 28, "text-anchor": anchor }, text));
    write(1, "start", RK.signed(-most, 2));
    write(94, "middle", "0");
    write(188, "end", RK.signed(most, 2));
    const [less, more] = field === "peer" || field.startsWith("A") ? ["worse", "better"] : ["below 0", "above 0"];
    return RK.el("span", { class: "tree-scale" }, less, bar, more);
  };

  const told = (group, names, episode, step) => {
    const one = group.episodes[episode].steps[step];
    const numbers = NUMBERS.map(([key, name]) => `${name} ${RK.signed(one[key])}`).join(", ");
    const peers = one.peers?.length ?? 0;
    return `episode ${RK.numberOf(group, episode)}, step ${step}: ${RK.cut(names[episode][step], 200)}; ${numbers}; ${peers} peer${peers === 1 ? "" : "s"}`;
  };

  const mean = (values) => {
    const known = values.filter((value) => typeof value === "number");
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };

  // The actions taken in the state of a step, best first: {text, members, ret, A, peer}.
  const doneThere = (group, names, episode, step) => {
    const one = group.episodes[episode].steps[step];
    const actions = new Map();
    for (const [e, t] of [[episode, step], ...(one.peers ?? [])]) {
      const text = names[e]?.[t];
      if (text === undefined) continue; // in another part of the group
      if (!actions.has(text)) actions.set(text, { text, members: [], steps: [] });
      actions.get(text).members.push([e, t]);
      actions.get(text).steps.push(group.episodes[e].steps[t]);
    }
    return [...actions.values()]
      .map(({ text, members, steps }) => {
        const [ret, A, peer] = ["ret", "A", "peer"].map((key) => mean(steps.map((step) => step[key])));
        return { text, members, ret, A, peer };
      })
      .sort((a, b) => (b.peer ?? -Infinity) - (a.peer ?? -Infinity) || b.members.length - a.members.length);
  };
  RK.doneThere = doneThere;

  // The panel under the picture.
  RK.treePanel = (group, names) => {
    const element = RK.el("div", { class: "tree-panel" });
    const scales = RK.scalesOf(group);
    const mostReturn = group.episodes.reduce((most, one) => one.steps.reduce((larger, step) => Math.max(larger, Math.abs(step.ret ?? 0)), most), 1e-9);

    const numbers = (one) => RK.el("dl", { class: "tree-numbers" }, NUMBERS.map(([key, name, hint]) => RK.el("div", { title: hint },
      RK.el("dt", null, key.startsWith("A_") ? ["A", RK.el("sub", null, key.slice(2))] : name), RK.el("dd", { class: key in scales && key !== "reward" && key !== "ret" ? RK.heat(one[key], scales[key]) : null }, RK.signed(one[key])))));

    const bar = (value) => {
      const width = value === null ? 0 : (Math.abs(value) / mostReturn) * 80;
      return RK.el("td", { class: "n" }, RK.svg("svg", { width: 84, height: 10, "aria-hidden": "true" },
        RK.svg("rect", { class: "ret", x: 2, y: 0, width, height: 10, rx: 2 })), ` ${RK.signed(value)}`);
    };

    const links = (members) => RK.el("td", null, members.slice(0, LISTED).map(([e, t]) => [
      RK.el("a", { href: RK.href("episode", group.episodes[e].id, t), title: told(group, names, e, t) }, `#${RK.numberOf(group, e)}`), " ",
    ]), members.length > LISTED ? `and ${members.length - LISTED} more` : null);

    const row = (found, isOwn) => RK.el("tr", { class: isOwn ? "own" : null },
      RK.el("th", { scope: "row" }, RK.el("span", { class: "stranger", dir: "auto" }, RK.shown(found.text, 80)), isOwn ? RK.el("span", { class: "this" }, "this step") : null),
      RK.el("td", { class: "n" }, `${found.members.length}×`), bar(found.ret),
      RK.el("td", { class: "n" }, RK.el("span", { class: `chip-heat ${RK.heat(found.A, scales.A)}` }, RK.signed(found.A, 2))), links(found.members));

    const table = (episode, step) => {
      const found = doneThere(group, names, episode, step);
      const steps = found.reduce((sum, one) => sum + one.members.length, 0);
      if (steps < 2) return RK.el("p", { class: "faint" }, "No other step of the group was taken in this state, so there is nothing to compare.");
      const episodes = new Set(found.flatMap((one) => one.members.map(([e]) => e))).size;
      return [
        RK.el("h4", null, `Actions in this state: ${steps} steps of ${episodes} episode${episodes === 1 ? "" : "s"}`),
        RK.el("div", { class: "tree-actions" }, RK.el("table", null,
          RK.el("thead", null, RK.el("tr", null, ["action", "times", "mean return", "mean A", "episodes"].map((name, place) => RK.el("th", { scope: "col", class: place > 0 && place < 4 ? "n" : null }, name)))),
          RK.el("tbody", null, found.map((one) => row(one, one.text === names[episode][step]))))),
      ];
    };

    let now = "";
    const show = (episode, step) => {
      if (now === `${episode} ${step}`) return element; // keep the focus
      now = `${episode} ${step}`;
      const one = group.episodes[episode]?.steps[step];
      if (!one) return element.replaceChildren();
      const state = RK.stateText(group.episodes[episode], step);
      const head = RK.el("h4", null, `Episode ${RK.numberOf(group, episode)}, step ${step}: `, RK.el("span", { class: "stranger", dir: "auto" }, RK.shown(names[episode][step], 160)));
      element.replaceChildren(RK.el("div", null, head, numbers(one), state ? RK.el("pre", { class: "tree-state stranger" }, RK.shown(state, STATE)) : null),
        RK.el("div", null, table(episode, step)));
      return element;
    };
    return { element, show, told: (episode, step) => told(group, names, episode, step) };
  };

  // The text description: where the episodes split, and the outcomes.
  RK.treeWords = (group, names) => {
    const seen = new Set();
    const lines = [];
    group.episodes.forEach((one, episode) => one.steps.forEach((step, place) => {
      if (seen.has(`${episode} ${place}`)) return;
      for (const [e, t] of [[episode, place], ...(step.peers ?? [])]) seen.add(`${e} ${t}`);
      const found = doneThere(group, names, episode, place);
      if (found.length < 2) return;
      const spread = (found[0].peer ?? 0) - (found[found.length - 1].peer ?? 0);
      const parts = found.slice(0, 6).map((done) => `${RK.shown(done.text, 60)} ${done.members.length}×, mean return ${RK.signed(done.ret)}`);
      lines.push([spread, `In the state of episode ${RK.numberOf(group, episode)}, step ${place}: ${parts.join("; ")}${found.length > 6 ? "; …" : ""}.`]);
    }));
    lines.sort((a, b) => b[0] - a[0]);
    const ends = group.episodes.map((one, place) => `#${RK.numberOf(group, place)}: ${one.steps.length} steps, ${typeof one.score === "number" ? "score " : ""}${RK.scoreText(one)}`);
    return RK.el("details", { class: "tree-words" }, RK.el("summary", null, "Text description"),
      RK.el("p", null, `${group.episodes.length} episodes. ${ends.join(". ")}.`),
      lines.length ? RK.el("p", null, "States with different actions, largest difference from peers first:") : null,
      RK.el("ol", null, lines.slice(0, CROSSROADS).map(([, line]) => RK.el("li", { class: "stranger" }, line))),
      lines.length > CROSSROADS ? RK.el("p", null, `and ${lines.length - CROSSROADS} more states.`) : null);
  };
})();
