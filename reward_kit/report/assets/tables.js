// Sortable, filterable and searchable tables: rows in RK.data, frames in the page, listed by RK.tables.
(() => {
  const PAGE = 50;
  const LONG = 100;
  const SHORT = 12; // a longer text may be truncated, so that it has a tooltip
  const TAIL = 6; // the last characters of a long name, which stay visible
  const formats = {
    score: RK.figure,
    signed: RK.signed,
    mean: (x) => x.toFixed(1),
    count: RK.count,
    cost: RK.dollars,
    seconds: RK.seconds,
  };
  const tables = {};

  // A cell may be [text, link target].
  const plain = (cell) => (Array.isArray(cell) ? cell[0] : cell);
  const stored = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const tagsOf = (cell) => String(cell).split(" · ");
  const isNothing = (value) => value === null || value === "";
  const isOwn = (href) => /^(#|\/(?!\/)|\.\/)/.test(href);

  // The second line of a cell.
  const below = (column, value) => RK.el("div", { class: "below stranger", dir: "auto", title: plain(value), "aria-label": column.label }, plain(value));

  // A name in two parts, so that an ellipsis leaves its end visible.
  const ends = (text) =>
    text.length > 2 * TAIL + 2 && /^[\x20-\x7e]*$/.test(text)
      ? RK.el("span", { class: "ends" }, RK.el("span", null, text.slice(0, -TAIL)), RK.el("span", null, text.slice(-TAIL)))
      : text;

  class Table {
    constructor(section) {
      this.section = section;
      this.name = section.dataset.table;
      this.columns = RK.data[this.name].columns;
      this.rows = RK.data[this.name].rows;
      this.body = section.querySelector("tbody");
      this.status = section.querySelector("[role=status]");
      this.search = section.querySelector("input[type=search]");
      this.selects = [...section.querySelectorAll("select[data-column]")];
      this.figures = section.querySelector("[data-grid-figure]"); // the column that the grid and the bounds use
      this.figures?.addEventListener("change", () => {
        for (const span of section.querySelectorAll("[data-grid-name]")) span.textContent = this.figure().label;
        this.show(0);
      });
      this.chip = section.querySelector(".chip");
      this.exact = null;
      this.found = null; // {said, ids}: the episodes whose text contains the search
      this.sort = null;
      this.page = 0;
      this.texts = null;
      this.version = 0; // increases when rows change
      this.matches = section.querySelector("[data-matches]");
      this.hidden = null; // the columns that are not shown
      this.shown = null; // called with the matching rows
      this.heads = [...section.querySelectorAll("th")];
      this.heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => this.by(place)));
      this.search.addEventListener("input", () => this.searchTexts());
      this.bounds = [...section.querySelectorAll("[data-bound]")]; // of the figure
      this.bounds.forEach((bound) => bound.addEventListener("input", () => this.show(0)));
      this.selects.forEach((select) => select.addEventListener("change", () => this.show(0)));
      this.chip.addEventListener("click", () => this.only(null));
      [this.back, this.next] = section.querySelectorAll(".pager button");
      this.back.addEventListener("click", () => this.turn(-1));
      this.next.addEventListener("click", () => this.turn(1));
      section.querySelector("[data-clear]").addEventListener("click", () => this.clear());
      this.show(0);
    }

    // Hide columns without values, those whose values are second lines of another column, and metrics that are not chosen.
    hideColumns() {
      const figure = this.figures?.value;
      if (this.hidden?.version === this.version && this.hidden.figure === figure) return;
      const isOther = (key) => key.startsWith("metric ") && key !== figure;
      const isEmpty = (place) => this.rows.length > 0 && this.rows.every((row) => isNothing(plain(row[place])));
      const isHidden = this.columns.map(({ key, below }, place) => Boolean(below) || isOther(key) || isEmpty(place));
      this.hidden = { version: this.version, figure, has: isHidden };
      this.heads.forEach((head, place) => (head.hidden = isHidden[place]));
    }

    place(key) {
      return this.columns.findIndex((column) => column.key === key);
    }

    by(place) {
      const isNumber = this.columns[place].kind in formats;
      const down = this.sort?.place === place ? !this.sort.down : isNumber;
      this.sort = { place, down };
      this.heads.forEach((head, at) => {
        if (at === place) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      this.show(0);
    }

    only(exact) {
      this.exact = exact;
      this.chip.hidden = exact === null;
      if (exact !== null) this.chip.textContent = `${exact.key}: ${exact.value} ✕`;
      this.show(0);
    }

    reset() {
      this.search.value = "";
      for (const control of [...this.selects, ...this.bounds]) control.value = "";
    }

    clear() {
      this.reset();
      this.only(null);
    }

    filter(key, value) {
      this.reset();
      const select = this.selects.find((one) => one.dataset.column === key);
      const isOffered = select && [...select.options].some((option) => option.value === value);
      if (isOffered) select.value = value;
      this.only(isOffered ? null : { key, value });
    }

    // Replace rows with the same key, or append. Sorting and filters stay.
    upsert(rows) {
      const keyOf = (row) => JSON.stringify(row.slice(0, RK.data[this.name].key ?? 1));
      const places = new Map(this.rows.map((row, at) => [keyOf(row), at]));
      for (const row of rows) {
        const key = keyOf(row);
        if (!places.has(key)) places.set(key, this.rows.length);
        this.rows[places.get(key)] = row;
      }
      this.selects.forEach((select) => this.offer(select, rows));
      this.texts = null;
      this.version += 1;
      if (this.found) this.searchTexts(this.page);
      else this.show(this.page);
    }

    remove(isGone) {
      this.rows = this.rows.filter((row) => !isGone(row));
      this.texts = null;
      this.version += 1;
      this.show(this.page);
    }

    offer(select, rows) {
      const known = new Set([...select.options].map((option) => option.value));
      const place = this.place(select.dataset.column);
      for (const value of new Set(rows.flatMap((row) => (select.dataset.column === "tags" ? tagsOf(row[place]) : [plain(row[place])])))) {
        if (!isNothing(value) && !known.has(value)) select.append(RK.el("option", { value }, value));
      }
      select.parentElement.hidden = select.options.length < (select.dataset.column === "error" ? 2 : 3);
    }

    said() {
      return this.search.value.trim().toLowerCase();
    }

    // Show the rows whose cells match, then also those whose episode's text matches.
    async searchTexts(page = 0) {
      const said = this.said();
      if (this.name !== "episodes" || !RK.searchText) return this.show(page);
      if (said !== this.found?.said) this.found = said ? { said, ids: null } : null;
      this.show(page);
      if (!said) return;
      const ids = await RK.searchText(said).catch(() => new Set());
      if (said !== this.said()) return;
      this.found = { said, ids };
      // The texts only add rows. Without a new row, keep what is rendered, and the focus in it.
      if (this.chosen().length === this.count) return this.tell();
      const keeping = RK.keeping ?? ((body, change) => change());
      keeping(this.body, () => this.show(page));
    }

    // The column that the grid shows and the bounds limit: the score or a metric.
    figure() {
      return this.columns[this.place(this.figures?.value || "score")];
    }

    isWithin(row) {
      const [low, high] = this.bounds.map((bound) => bound.valueAsNumber);
      const score = row[this.place(this.figure().key)];
      return score !== null && !(score < low) && !(score > high);
    }

    chosen() {
      const wanted = this.selects.filter((one) => one.value).map((one) => [this.place(one.dataset.column), one.value]);
      if (this.exact) wanted.push([this.place(this.exact.key), this.exact.value]);
      const said = this.said();
      if (said && !this.texts) {
        const words = (row) =>
          row
            .map(plain)
            .filter((cell) => typeof cell === "string")
            .join("\n")
            .toLowerCase();
        this.texts = this.rows.map(words);
      }
      const isBounded = this.bounds.some((bound) => bound.value !== "");
      const isSaid = (row, at) => this.texts[at].includes(said) || this.found?.ids?.has(stored(row[0]));
      const isWanted = (cell, value) => (value === "(none)" && isNothing(cell)) || plain(cell) === value;
      const has = (place) => (this.columns[place].kind === "tags" ? (cell, value) => tagsOf(cell).includes(value) : isWanted);
      const isChosen = (row, at) =>
        wanted.every(([place, value]) => has(place)(row[place], value)) &&
        (!isBounded || this.isWithin(row)) &&
        (!said || isSaid(row, at));
      return this.sorted(this.rows.filter(isChosen));
    }

    sorted(rows) {
      if (!this.sort) return rows;
      const { place, down } = this.sort;
      return rows.sort((one, other) => {
        const [a, b] = [plain(one[place]), plain(other[place])];
        if (isNothing(a) || isNothing(b)) return isNothing(a) - isNothing(b); // unknown values last
        const order = a < b ? -1 : Number(a > b);
        return down ? -order : order;
      });
    }

    turn(by) {
      this.show(this.page + by, true);
    }

    show(page, isTurned = false) {
      this.section.hidden = "optional" in this.section.dataset && this.rows.length === 0;
      this.hideColumns();
      const rows = this.chosen();
      const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
      this.page = Math.min(Math.max(0, page), last);
      const begin = this.page * PAGE;
      const shown = rows.slice(begin, begin + PAGE);
      this.body.replaceChildren(...shown.map((row) => this.line(row)));
      this.count = rows.length;
      this.tell();
      this.back.disabled = this.page === 0;
      this.next.disabled = this.page === last;
      if (!isTurned) this.shown?.(rows);
    }

    tell() {
      const begin = this.page * PAGE;
      const of = this.count === this.rows.length ? "" : ` (of ${RK.count(this.rows.length)})`;
      const text = this.count
        ? `${begin + 1}–${Math.min(begin + PAGE, this.count)} of ${RK.count(this.count)}${of}`
        : `nothing found${of}`;
      const isSearching = this.found && !this.found.ids;
      this.status.textContent = isSearching ? `${text}, searching texts …` : text;
      this.matches.textContent = of && !isSearching ? `${RK.count(this.count)} of ${RK.count(this.rows.length)} match` : "";
    }

    wantedPolicy() {
      return this.selects.find((one) => one.dataset.column === "policy")?.value ?? "";
    }

    line(row) {
      return RK.el(
        "tr",
        null,
        this.columns.map((column, place) => this.cell(column, row[place], row, this.hidden.has[place])),
      );
    }

    cell(column, value, row, hidden) {
      const facts = { "data-of": column.key, "data-label": column.label, hidden };
      if (column.kind in formats) {
        const number = plain(value);
        const shown = isNothing(number) ? RK.DASH : formats[column.kind](number);
        const isLink = Array.isArray(value) && isOwn(value[1]);
        const label = `${shown}, transcripts of ${column.label}`;
        return RK.el("td", { class: "n", ...facts }, isLink ? RK.el("a", { href: value[1], "aria-label": label }, shown) : shown);
      }
      const text = isNothing(value) ? "" : String(plain(value));
      const title = text.length > SHORT ? text : null;
      return RK.el(
        "td",
        { class: column.kind === "link" ? "id" : column.kind, title, ...facts },
        this.content(column, value, text),
        this.columns.map((other, place) => (other.below === column.key && row[place] ? below(other, row[place]) : null)),
      );
    }

    content(column, value, text) {
      const stranger = { class: "stranger", dir: "auto" };
      if (!text) return null;
      if (column.view) {
        const id = Array.isArray(value) ? value[1] : value;
        return RK.el("a", { ...stranger, href: RK.href(column.view, id), "aria-label": text }, ends(text));
      }
      if (column.kind === "link" && isOwn(value[1])) return RK.el("a", { ...stranger, href: value[1] }, text);
      if (column.filters) {
        const onclick = () => goTo("episodes", column.filters, text);
        return RK.el("button", { type: "button", class: "link stranger", dir: "auto", onclick }, text);
      }
      if (text.length <= LONG) return RK.el("span", stranger, column.key === "policy" ? ends(text) : text);
      return RK.el(
        "details",
        null,
        RK.el("summary", stranger, `${RK.cut(text, LONG)}…`),
        RK.el("span", stranger, text),
      );
    }
  }

  const goTo = (name, key, value) => {
    tables[name].filter(key, value);
    const heading = document.getElementById(name);
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  };

  // Controls that need this script are disabled until it runs.
  const enliven = (root) => {
    for (const button of root.querySelectorAll("button[data-key]")) button.disabled = false;
  };

  RK.register("tables", () => {
    for (const section of document.querySelectorAll("[data-table]")) {
      tables[section.dataset.table] = new Table(section);
    }
    enliven(document);
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-key]");
      if (button) goTo("episodes", button.dataset.key, button.dataset.value);
    });
  });
  Object.assign(RK, { Table, enliven, plain, stored, tables });
})();
