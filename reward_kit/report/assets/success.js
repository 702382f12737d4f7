// The success probability before the steps of an episode, measured by continuing it: one curve per continuing policy.
(() => {
  const { el, svg } = RK;
  const [LEFT, RIGHT, TOP, HEIGHT, LINE] = [38, 30, 8, 140, 13];
  const WIDEST = 1000;
  const LISTED = 5; // first actions of continuations, per change
  const LONGEST = 300; // displayed characters of an action
  const SHAPES = ["M-4,0A4,4 0 1 0 4,0A4,4 0 1 0 -4,0Z", "M-4,-4H4V4H-4Z", "M0,-5L5,4H-5Z"];
  const END = "M0,-6L6,0L0,6L-6,0Z";

  const share = (x) => x.toFixed(2);
  const isLoss = ({ before, after }) => after < before;
  const differs = (episode) => episode.curves.some((curve) => curve.continued_by !== episode.policy);
  const name = (curve) => RK.shown(curve.continued_by, 80);
  const action = (text) => el("code", { class: "action stranger", dir: "auto" }, RK.shown(text, LONGEST));

  const told = (episode, curve, { step, passed, scored, low, high }) => {
    const interval = `${RK.short(100 * curve.confidence)}% interval ${share(low)} to ${share(high)}`;
    const by = differs(episode) ? `, continued by ${name(curve)}` : "";
    return `Before step ${step}: ${passed} of ${scored} continuations passed, ${share(passed / scored)} (${interval})${by}`;
  };
  const actionOf = (episode, step) => RK.shown(episode.steps[step]?.action ?? "", LONGEST);

  // A mark of each change at the first step that it may be due to.
  RK.successTags = (episode, t) =>
    episode.curves.map((curve) =>
      curve.changes.filter(({ step }) => step === t).map((change) => {
        const until = change.next === t + 1 ? "" : ` by step ${change.next}`;
        const by = differs(episode) ? ` (${name(curve)})` : "";
        const text = `success ${share(change.before)} → ${share(change.after)}${until}${by}`;
        return el("span", { class: `stranger tag ${isLoss(change) ? "bad" : "gained"}` }, text);
      }),
    );

  class Curves {
    constructor(episode, space, open) {
      Object.assign(this, { episode, open });
      this.count = episode.steps.length;
      this.width = Math.max(280, Math.min(WIDEST, (space || WIDEST) - 20));
      const [of, apart] = [episode.curves.length, this.x(1) - this.x(0)];
      this.gap = Math.min(10, Math.max(4, apart / (of + 1.5))); // between curves, so that their intervals do not overlap
      this.wide = of > 1 ? this.gap : Math.min(28, Math.max(8, apart)); // of the area that responds to the pointer
      this.top = TOP + LINE * Math.max(1, episode.curves.filter((curve) => curve.changes.length).length);
      this.base = this.top + HEIGHT;
      const hint = "Hover over a value to see its figures, and click it to go to the step.";
      this.readout = el("p", { class: "readout stranger", dir: "auto" }, hint);
      this.element = el(
        "section",
        { class: "success", "aria-label": "Success probability" },
        el("h3", null, "Success probability before each step"),
        this.legend(),
        this.picture(),
        this.readout,
        episode.curves.map((curve) => this.changesOf(curve)),
        this.words(),
      );
    }

    x(step) {
      return LEFT + ((this.width - LEFT - RIGHT) * step) / Math.max(1, this.count);
    }

    y(value) {
      return this.base - HEIGHT * value;
    }

    at(place, step) {
      return this.x(step) + (place - (this.episode.curves.length - 1) / 2) * this.gap;
    }

    legend() {
      const { curves } = this.episode;
      if (!differs(this.episode)) return null;
      const line = (place) => svg("svg", { viewBox: "-13 -6 26 12", "aria-hidden": "true" }, this.line(place, "M-13,0H13"), this.shape(place, 0, 0));
      return el("ul", { class: "legend" }, curves.map((curve, place) => el("li", null, line(place), "continued by ", el("span", { class: "stranger" }, name(curve)))));
    }

    // A link to a step, which also works for the step that is already selected.
    link(step) {
      const onclick = (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        this.open(step);
      };
      return { href: RK.href("episode", this.episode.id, step), onclick };
    }

    line(place, d, kind = "") {
      return svg("path", { class: `s${place % SHAPES.length} ${kind}`, d });
    }

    shape(place, x, y) {
      return svg("path", { class: `mark s${place % SHAPES.length}`, d: SHAPES[place % SHAPES.length], transform: `translate(${x},${y})` });
    }

    picture() {
      const told = "Success probability over the steps of the episode. Each value is a link to its step.";
      const root = svg("svg", { viewBox: `0 0 ${this.width} ${this.base + 18}`, role: "group", "aria-label": told, css: { "max-width": `${this.width}px` } });
      this.now = svg("rect", { class: "now", y: this.top, height: HEIGHT, hidden: true });
      const { curves } = this.episode;
      root.append(...curves.flatMap((curve, place) => this.bands(curve, place)), ...this.axes(), this.now);
      curves.forEach((curve, place) => root.append(...this.lines(curve, place)));
      const isPassed = curves[0].passed;
      root.append(svg("path", { class: "end", d: END, transform: `translate(${this.x(this.count)},${this.y(isPassed ? 1 : 0)})` }));
      curves.forEach((curve, place) => root.append(...curve.values.map((value) => this.point(curve, place, value))));
      return root;
    }

    axes() {
      const write = (x, y, anchor, text) => svg("text", { x, y, "text-anchor": anchor, class: "faint" }, text);
      const heights = [0, 0.5, 1].flatMap((value) => [
        svg("path", { class: value ? "grid" : "axis", d: `M${LEFT},${this.y(value)}H${this.width - RIGHT}` }),
        write(LEFT - 14, this.y(value) + 4, "end", String(value)),
      ]);
      const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((one) => this.x(one) - this.x(0) >= 30) ?? this.count;
      const ticks = [];
      for (let step = 0; this.x(this.count) - this.x(step) >= 30; step += every) ticks.push(write(this.x(step), this.base + 15, "middle", step));
      const end = this.episode.curves[0].passed ? "passed" : "failed";
      return [...heights, ...ticks, write(this.x(this.count), this.base + 15, "middle", end)];
    }

    // The steps of each change, with its size above.
    bands({ changes: found }, place) {
      const row = this.episode.curves.slice(0, place).filter((curve) => curve.changes.length).length;
      return found.flatMap((change) => {
        const [from, to] = [this.x(change.step), this.x(change.next)];
        const kind = isLoss(change) ? "lost" : "gained";
        const size = RK.signed(change.after - change.before, 2);
        return [
          svg("rect", { class: kind, x: from, y: this.top, width: to - from, height: HEIGHT }),
          svg("text", { class: kind, x: (from + to) / 2, y: TOP + LINE * row + 7, "text-anchor": "middle" }, size),
        ];
      });
    }

    // Lines between measured values; those over steps that were not measured are pale.
    lines({ values, passed }, place) {
      const points = values.map((value) => [value.step, this.at(place, value.step), this.y(value.passed / value.scored)]);
      points.push([this.count, this.x(this.count), this.y(passed ? 1 : 0)]);
      return points.slice(1).map(([step, x, y], at) => {
        const [before, fromX, fromY] = points[at];
        return this.line(place, `M${fromX},${fromY}L${x},${y}`, step > before + 1 ? "skipped" : "");
      });
    }

    point(curve, place, value) {
      const { step, low, high } = value;
      const [x, y] = [this.at(place, step), this.y(value.passed / value.scored)];
      const text = told(this.episode, curve, value);
      const look = () => this.readout.replaceChildren(text, ". Action: ", action(this.episode.steps[step]?.action ?? ""));
      const label = `${text}. Action: ${actionOf(this.episode, step)}`;
      return svg(
        "a",
        { class: "point", "aria-label": label, ...this.link(step), onfocus: look, onmouseenter: look },
        svg("rect", { class: "hit", x: x - this.wide / 2, y: this.top, width: this.wide, height: HEIGHT }),
        this.line(place, `M${x},${this.y(low)}V${this.y(high)}M${x - 3},${this.y(low)}h6M${x - 3},${this.y(high)}h6`, "range"),
        this.shape(place, x, y),
      );
    }

    // The steps that changed the success probability, in words.
    changesOf(curve) {
      const by = () => (differs(this.episode) ? [el("span", { class: "stranger" }, name(curve)), ": "] : null);
      const found = curve.changes.map((change) => this.changed(by(), change));
      return [
        found.length ? found : el("p", null, by(), "No step changed the success probability significantly."),
        curve.stopped === null ? null : el("p", { class: "faint stranger" }, by(), `The search stopped early: ${RK.shown(curve.stopped, LONGEST)}`),
      ];
    }

    changed(by, change) {
      const { step, next, before, after, instead } = change;
      const link = el("a", this.link(step), `${step}`);
      const where = next === step + 1 ? ["at step ", link] : ["between step ", link, ` and ${next < this.count ? `step ${next}` : "the end"}`];
      const rest = instead.length - LISTED;
      return el(
        "div",
        { class: isLoss(change) ? "change-told down" : "change-told" },
        el("strong", null, by, `Success probability ${isLoss(change) ? "lost" : "gained"} `, where, `: ${share(before)} → ${share(after)}`),
        change.action === null ? null : el("div", null, "action: ", action(change.action)),
        isLoss(change) && instead.length
          ? [
              el("div", null, "first actions of the continuations that passed:"),
              el("ul", null, instead.slice(0, LISTED).map((one) => el("li", null, `${RK.count(one.passed)} × `, action(one.action)))),
              rest > 0 ? el("div", { class: "faint" }, `and ${RK.count(rest)} more`) : null,
            ]
          : null,
      );
    }

    words() {
      const { curves } = this.episode;
      const values = curves.flatMap((curve) => curve.values.map((value) => ({ curve, value })));
      const line = ({ curve, value }) => el("li", { class: "stranger" }, `${told(this.episode, curve, value)}. Action: ${actionOf(this.episode, value.step)}`);
      const end = `The episode ${curves[0].passed ? "passed" : "failed"} after ${RK.count(this.count)} steps.`;
      return el("details", null, el("summary", null, "Text description"), el("ul", null, values.map(line), el("li", null, end)));
    }

    // Mark the selected step in the picture.
    mark(step) {
      this.now.removeAttribute("hidden");
      this.now.setAttribute("x", this.x(step));
      this.now.setAttribute("width", this.x(step + 1) - this.x(step));
    }
  }

  RK.successCurves = (episode, space, open) => new Curves(episode, space, open);
})();
