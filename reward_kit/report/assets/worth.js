// The credit of a step in numbers and bars, and the actions of others in its state.
(() => {
  const { el } = RK;
  const LISTED = 12; // peers listed for one action
  const ACTIONS = 12; // actions listed for one state
  const NUMBERS = [
    ["reward", "reward", "reward of this step"],
    ["ret", "G", "return: discounted rewards from this step on"],
    ["A_E", "A_E", "the episode's advantage: its score compared with its group"],
    ["A_S", "A_S", "the step's advantage: its return compared with others in the same state"],
    ["A", "A", "advantage: the combination used in training"],
    ["peer", "peers", "undiscounted return compared with the other episodes in this state"],
  ];

  // Numbers

  const most = (group, keys) => {
    let found = 0;
    for (const { steps } of group.episodes) {
      for (const step of steps) for (const key of keys) found = Math.max(found, Math.abs(step[key] ?? 0));
    }
    return found;
  };
  const scalesOf = (group) => {
    const advantages = group.is_tied ? 0 : most(group, ["A_E", "A_S", "A"]); // 0: neither bars nor colors
    return {
      reward: most(group, ["reward"]),
      ret: most(group, ["ret"]),
      A_E: advantages,
      A_S: advantages,
      A: advantages,
      peer: most(group, ["peer"]),
    };
  };

  // A bar from the middle, to the right above 0 and to the left below, scaled by the group's largest value.
  const barOf = (value, scale, isAdvantage) => {
    const share = value === null || !scale ? 0 : Math.min(1, Math.abs(value) / scale) * 50;
    const css = value < 0 ? { right: "50%", width: `${share}%` } : { left: "50%", width: `${share}%` };
    return el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      share ? el("span", { class: `fill ${isAdvantage ? (value < 0 ? "less" : "more") : "plain"}`, css }) : null,
    );
  };

  // A_E with E as a subscript.
  const nameOf = (name) => (name.startsWith("A_") ? ["A", el("sub", null, name.slice(2))] : name);

  const numbersOf = (step, scales) =>
    el(
      "dl",
      { class: "numbers" },
      NUMBERS.map(([key, name, told]) =>
        el(
          "div",
          { title: told, class: key === "A" ? "whole" : null },
          el("dt", null, nameOf(name)),
          el(
            "dd",
            null,
            barOf(step[key], scales[key], key !== "reward" && key !== "ret"),
            el(
              "span",
              { class: key === "A" ? `value ${RK.heat(step[key], scales[key])}` : "value" },
              RK.signed(step[key]),
            ),
          ),
        ),
      ),
    );

  // Actions of others in the same state

  const linksTo = (group, members) => [
    members
      .slice(0, LISTED)
      .map(([e, t]) => [
        el("a", { href: RK.href("episode", group.episodes[e].id, t) }, `#${group.first + e + 1}, step ${t}`),
        " ",
      ]),
    members.length > LISTED ? `and ${RK.count(members.length - LISTED)} more` : null,
  ];

  const actionRow = (group, action, own, scale) => {
    const isOwn = action.members.some(([e, t]) => e === own[0] && t === own[1]);
    const others = action.members.filter(([e, t]) => e !== own[0] || t !== own[1]);
    return el(
      "tr",
      { class: isOwn ? "own" : null },
      el(
        "td",
        null,
        el("span", { class: "stranger action", dir: "auto" }, RK.shown(action.text, 160)),
        isOwn ? el("span", { class: "tag" }, "this step") : null,
      ),
      el("td", { class: "n", "data-label": "times" }, RK.count(action.members.length)),
      el("td", { class: "n", "data-label": "mean G" }, RK.signed(action.mean_return)),
      el(
        "td",
        { class: "n", "data-label": "mean A" },
        el("span", { class: `value ${RK.heat(action.mean_A, scale)}` }, RK.signed(action.mean_A)),
      ),
      el(
        "td",
        { class: "text" },
        others.length ? linksTo(group, others) : el("span", { class: "faint" }, "no others"),
      ),
    );
  };

  const peersOf = (group, anchor, own, scale) => {
    if (!anchor)
      return el(
        "p",
        { class: "faint" },
        "No other step of the group was taken in this state, so there is nothing to compare.",
      );
    const worth = (action) => action.mean_peer ?? -Infinity;
    const actions = [...anchor.actions].sort((one, other) => worth(other) - worth(one));
    const isOwn = (action) => action.members.some(([e, t]) => e === own[0] && t === own[1]);
    const place = actions.findIndex(isOwn);
    if (place >= ACTIONS) actions.splice(ACTIONS - 1, 0, ...actions.splice(place, 1)); // always list this step's action
    const hidden = actions.slice(ACTIONS);
    const episodes = new Set(anchor.members.map(([e]) => e)).size;
    return el(
      "div",
      null,
      el(
        "h4",
        null,
        `In this state: ${RK.count(anchor.members.length)} steps of ${RK.count(episodes)} episode${episodes === 1 ? "" : "s"}`,
      ),
      el(
        "div",
        { class: "scroll list" },
        el(
          "table",
          null,
          el(
            "thead",
            null,
            el(
              "tr",
              null,
              [["action"], ["times", "n"], ["mean G", "n"], ["mean A", "n"], ["who"]].map(([name, kind]) =>
                el("th", { scope: "col", class: kind }, name),
              ),
            ),
          ),
          el(
            "tbody",
            null,
            actions.slice(0, ACTIONS).map((action) => actionRow(group, action, own, scale)),
          ),
        ),
      ),
      hidden.length
        ? el(
            "p",
            { class: "faint" },
            `and ${RK.count(hidden.length)} more actions, mean G ${RK.signed(hidden[0].mean_return)} to ${RK.signed(hidden.at(-1).mean_return)}`,
          )
        : null,
    );
  };

  Object.assign(RK, { numbersOf, peersOf, scalesOf });
})();
