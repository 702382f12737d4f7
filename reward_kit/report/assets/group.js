// A group: its diagram, and the list of its episodes.
(() => {
  const { el } = RK;

  const episodeRow = (group, one) =>
    el(
      "tr",
      null,
      el("td", { class: "n", "data-label": "#" }, group.first + one.index + 1),
      el("td", { class: "id" }, el("a", { class: "stranger", dir: "auto", href: RK.href("episode", one.id) }, one.id)),
      el("td", { class: "n", "data-label": "score" }, RK.figure(one.score)),
      el("td", { class: "n", "data-label": "steps" }, one.steps.length),
      el("td", { class: "n", "data-label": "took" }, RK.seconds(one.took_s)),
      el("td", { "data-label": "by" }, el("span", { class: "stranger" }, one.stop)),
      el(
        "td",
        { class: "text" },
        el("span", { class: "stranger", dir: "auto" }, RK.shown(one.error_message || one.reason, 300)),
      ),
    );

  RK.view("group", async (container, [id], isCurrent) => {
    container.replaceChildren(el("p", { class: "faint", role: "status" }, "Loading the group …"));
    const group = await RK.group(id);
    if (!isCurrent()) return;
    const heading = el("h2", { tabindex: -1, class: "stranger", dir: "auto" }, group.id);
    const tree = el("div");
    const shownOf =
      group.episodes.length < group.size
        ? `showing ${group.episodes.length} of ${RK.count(group.size)} episodes`
        : `${group.size} episode${group.size === 1 ? "" : "s"}`;
    container.replaceChildren(
      el(
        "nav",
        { class: "topbar", "aria-label": "Group" },
        el("a", { class: "button", href: "#", title: "key Esc" }, "Overview"),
      ),
      el("p", { class: "faint crumbs" }, "group of sample ", el("span", { class: "stranger" }, group.sample)),
      heading,
      el(
        "ul",
        { class: "facts" },
        [
          group.policy,
          shownOf,
          `mean score ${RK.figure(group.baseline)}`,
          `${RK.count(group.anchors.length)} states shared by several steps`,
        ].map((one) => el("li", { class: "stranger" }, one)),
      ),
      RK.creditTold(group.episodes[0]),
      RK.tiedNote(group) ?? "",
      tree,
      el("h3", null, "Episodes"),
      el(
        "div",
        { class: "scroll list", role: "region", tabindex: 0, "aria-label": "Episodes of the group" },
        el(
          "table",
          null,
          el(
            "thead",
            null,
            el(
              "tr",
              null,
              ["#", "episode", "score", "steps", "took", "stop reason", "reason or error"].map((name, place) =>
                el("th", { scope: "col", class: [0, 2, 3, 4].includes(place) ? "n" : null }, name),
              ),
            ),
          ),
          el(
            "tbody",
            null,
            group.episodes.map((one) => episodeRow(group, one)),
          ),
        ),
      ),
    );
    if (RK.tree && group.episodes.some((one) => one.steps.length)) RK.tree(tree, group);
    document.title = `${RK.shown(id, 60)} · reward-kit`;
    RK.setKeys({ Escape: () => RK.go("#") });
    window.scrollTo(0, 0);
    heading.focus({ preventScroll: true });
  });
})();
