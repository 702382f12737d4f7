// Samples by policy: a grid of mean scores above the list of episodes. A row is shown if one of its episodes matches the
// list's filters. Only the visible rows are in the page.
(() => {
  const { el, stored } = RK;
  const ROW = 34; // pixels, as in matrix.css
  const AROUND = 12; // rows rendered above and below the visible ones

  // Cells

  const meanOf = (cell) => (cell?.scored ? cell.sum / cell.scored : null);

  // Samples with a cell for each policy, from rows of the table of episodes.
  const samplesOf = (table) => {
    const keys = ["rollout", "sample", "policy", table.figure().key, "outcome"];
    const [id, sample, policy, score, outcome] = keys.map((key) => table.place(key));
    const samples = new Map(); // name -> {name, text, cells}, with a cell at the index of each policy
    const policies = new Map(); // name -> {name, text, index}
    for (const row of table.rows) {
      const [name, of] = [stored(row[sample]), stored(row[policy])];
      let own = samples.get(name);
      if (!own) samples.set(name, (own = { name, text: RK.plain(row[sample]), cells: [] }));
      let known = policies.get(of);
      if (!known) policies.set(of, (known = { name: of, text: RK.plain(row[policy]), index: policies.size }));
      const cell = (own.cells[known.index] ??= { ids: [], scored: 0, sum: 0, passed: 0, errors: 0 });
      cell.ids.push(stored(row[id]));
      if (row[score] !== null) {
        cell.scored += 1;
        cell.sum += row[score];
      }
      if (row[outcome] === "passed") cell.passed += 1;
      else if (row[outcome] === "error") cell.errors += 1;
    }
    const byName = (found) => [...found.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    return { samples: byName(samples), policies: byName(policies) };
  };

  // The largest difference between the means of two policies; null with fewer than two.
  const differenceOf = ({ cells }) => {
    const means = cells.map(meanOf).filter((mean) => mean !== null);
    return means.length > 1 ? Math.max(...means) - Math.min(...means) : null;
  };

  // The same as shown: with two policies, the mean of the second minus that of the first.
  const shownDifference = (sample, columns) => {
    if (columns.length !== 2) return RK.figure(differenceOf(sample));
    const [first, second] = columns.map(({ index }) => meanOf(sample.cells[index]));
    return first === null || second === null ? RK.DASH : RK.signed(second - first);
  };

  const toldOf = (cell, figure) => {
    if (!cell) return { kind: "none", text: RK.DASH, label: "no episode" };
    const unscored = cell.ids.length - cell.scored - cell.errors;
    const missing = [
      cell.errors ? `${cell.errors === 1 ? "" : `${RK.count(cell.errors)} `}error${cell.errors === 1 ? "" : "s"}` : "",
      unscored ? `${cell.ids.length === 1 ? "" : `${RK.count(unscored)} `}unscored` : "",
    ].filter(Boolean);
    const { key, label: name } = figure;
    if (cell.scored && key !== "score") {
      const text = [RK.figure(meanOf(cell)), ...missing].join(" · ");
      return { kind: "metric", text, label: `mean of ${name} ${RK.figure(meanOf(cell))}` };
    }
    if (!cell.scored) return { kind: cell.errors ? "error" : "unscored", text: missing.join(", "), label: "" };
    const kind = cell.passed === cell.scored ? "pass" : cell.passed ? "mixed" : "fail";
    const mark = { pass: "✓", mixed: "", fail: "✗" }[kind];
    const passes = cell.ids.length > 1 ? `${RK.count(cell.passed)}/${RK.count(cell.scored)}` : mark;
    const label = `mean score ${RK.figure(meanOf(cell))}, ${cell.passed} of ${cell.scored} passed`;
    return { kind, text: [RK.figure(meanOf(cell)), passes, ...missing].filter(Boolean).join(" · "), label };
  };

  class Matrix {
    constructor(box, table) {
      this.box = box;
      this.table = table;
      this.version = -1;
      this.sort = { key: "sample", down: false };
      this.at = { row: 0, column: 0 };
      this.space = el("div", { class: "matrix-space", role: "rowgroup" });
      this.head = el("div", { class: "matrix-row matrix-head", role: "row", "aria-rowindex": 1 });
      box.append(el("div", { role: "rowgroup", class: "matrix-heads" }, this.head), this.space);
      box.addEventListener("scroll", () => this.draw(), { passive: true });
      box.addEventListener("keydown", (event) => this.onKey(event));
      box.addEventListener("click", (event) => this.onClick(event));
      box.addEventListener("focusin", ({ target }) => this.onFocus(target));
      new ResizeObserver(() => this.draw()).observe(box);
    }

    // Show the samples of the matching episodes.
    show(chosen) {
      const [figure, { version }] = [this.table.figure(), this.table];
      if (this.version !== version || this.figure !== figure) Object.assign(this, samplesOf(this.table), { version, figure });
      const place = this.table.place("sample");
      const names = chosen.length < this.table.rows.length ? new Set(chosen.map((row) => stored(row[place]))) : null;
      const wanted = this.table.wantedPolicy();
      this.columns = this.policies.filter(({ text }) => !wanted || text === wanted);
      this.rows = this.sorted(names ? this.samples.filter(({ name }) => names.has(name)) : [...this.samples]);
      this.box.parentElement.hidden = this.samples.length === 0;
      this.hasDifference = this.columns.length > 1;
      this.box.style.setProperty("--columns", this.columns.length + Number(this.hasDifference));
      this.box.setAttribute("aria-rowcount", this.rows.length + 1);
      this.space.style.setProperty("height", `${this.rows.length * ROW}px`);
      this.at.row = Math.min(this.at.row, Math.max(0, this.rows.length - 1));
      this.at.column = Math.min(this.at.column, this.columns.length);
      this.drawHead();
      this.drawn = null;
      this.draw();
    }

    sorted(samples) {
      const { key, down } = this.sort;
      if (key === "sample") return down ? samples.reverse() : samples; // they are by name
      const valueOf = key === "difference" ? differenceOf : ({ cells }) => meanOf(cells[key.of]);
      const keyed = samples.map((sample) => [valueOf(sample), sample]);
      keyed.sort(([a, one], [b, other]) => {
        if (a === null || b === null) return (a === null) - (b === null) || (one.name < other.name ? -1 : 1);
        if (a === b) return one.name < other.name ? -1 : 1;
        return a < b === down ? 1 : -1;
      });
      return keyed.map(([, sample]) => sample);
    }

    by(key) {
      const isSame = this.sort.key === key || (key.of !== undefined && this.sort.key.of === key.of);
      this.sort = { key, down: isSame ? !this.sort.down : key === "difference" };
      this.show(this.table.chosen());
      const heads = [...this.head.querySelectorAll("button")];
      heads.find((one) => one.parentElement.hasAttribute("aria-sort"))?.focus();
    }

    drawHead() {
      const head = (key, text, isName) => {
        const isSorted = this.sort.key === key || (key.of !== undefined && this.sort.key.of === key.of);
        const sorted = isSorted ? (this.sort.down ? "descending" : "ascending") : null;
        const button = el("button", { type: "button", class: isName ? "stranger" : null, onclick: () => this.by(key) }, text);
        return el("div", { role: "columnheader", "aria-sort": sorted, title: isName ? text : null }, button);
      };
      this.head.replaceChildren(
        head("sample", "sample"),
        ...this.columns.map(({ index, text }) => head({ of: index }, text, true)),
        ...(this.hasDifference ? [head("difference", "difference")] : []),
      );
    }

    draw() {
      if (!this.rows) return;
      const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - AROUND);
      const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + AROUND);
      if (this.drawn === `${first}-${last}`) return;
      this.drawn = `${first}-${last}`;
      const hadFocus = this.space.contains(document.activeElement);
      const rows = this.rows.slice(first, last).map((sample, place) => this.row(sample, first + place));
      // Keep one cell reachable by Tab although its row is out of sight.
      if (this.at.row < first || this.at.row >= last) {
        if (this.rows[this.at.row]) rows.push(this.row(this.rows[this.at.row], this.at.row));
      }
      this.space.replaceChildren(...rows);
      if (hadFocus) this.link(this.at)?.focus({ preventScroll: true });
    }

    row(sample, index) {
      const link = (column, href, text, label) => {
        const tabindex = index === this.at.row && column === this.at.column ? 0 : -1;
        return el("a", { href, tabindex, data: { row: index, column }, "aria-label": label }, text);
      };
      const rowHref = RK.href("sample", sample.name);
      const cells = this.columns.map(({ name: policy, text, index: at }, place) => {
        const cell = sample.cells[at];
        const told = toldOf(cell, this.figure);
        const href = !cell ? rowHref : cell.ids.length === 1 ? RK.href("episode", cell.ids[0]) : RK.href("sample", sample.name, policy);
        const label = `${sample.text}, ${text}: ${told.label || told.text}`;
        return el("div", { role: "gridcell", class: `cell-${told.kind}` }, link(place + 1, href, told.text, label));
      });
      return el(
        "div",
        { class: "matrix-row", role: "row", "aria-rowindex": index + 2, css: { top: `${index * ROW}px` } },
        el("div", { role: "rowheader", class: "stranger", dir: "auto", title: sample.text }, link(0, rowHref, sample.text, null)),
        cells,
        this.hasDifference ? el("div", { role: "gridcell", class: "cell-plain" }, shownDifference(sample, this.columns)) : null,
      );
    }

    link({ row, column }) {
      return this.space.querySelector(`a[data-row="${row}"][data-column="${column}"]`);
    }

    // A click beside the links of a row opens its sample.
    onClick({ target }) {
      const link = target.closest("a") ? null : target.closest(".matrix-space > .matrix-row")?.querySelector("a");
      if (!link) return;
      link.focus({ preventScroll: true });
      RK.go(link.getAttribute("href"));
    }

    onFocus(target) {
      const { row, column } = target.dataset;
      if (row === undefined) return;
      this.link(this.at)?.setAttribute("tabindex", -1);
      this.at = { row: Number(row), column: Number(column) };
      target.setAttribute("tabindex", 0);
      this.reveal();
    }

    // Focus the current cell.
    focus() {
      this.reveal();
      this.drawn = null;
      this.draw();
      this.link(this.at)?.focus({ preventScroll: true });
    }

    reveal() {
      const [top, head] = [this.at.row * ROW, this.head.offsetHeight];
      const { scrollTop, clientHeight } = this.box;
      if (top < scrollTop) this.box.scrollTop = top;
      else if (top + ROW + head > scrollTop + clientHeight) this.box.scrollTop = top + ROW + head - clientHeight;
    }

    onKey(event) {
      if (!this.space.contains(event.target) || event.ctrlKey || event.altKey || event.metaKey) return;
      const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
      const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
      Object.assign(moves, { PageDown: [page, 0], PageUp: [-page, 0], Home: [-Infinity, 0], End: [Infinity, 0] });
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const within = (value, most) => Math.max(0, Math.min(value, most));
      const to = {
        row: within(this.at.row + move[0], this.rows.length - 1),
        column: within(this.at.column + move[1], this.columns.length),
      };
      this.link(this.at)?.setAttribute("tabindex", -1);
      this.at = to;
      this.focus();
    }
  }

  RK.register("matrix", () => {
    const box = document.querySelector("[data-matrix]");
    const table = RK.tables.episodes;
    if (!box || !table) return;
    RK.matrix = new Matrix(box, table);
    table.shown = (rows) => RK.matrix.show(rows);
    table.show(0);
  });
})();
