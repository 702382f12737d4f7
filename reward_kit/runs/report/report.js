"use strict";
// Everything on the page stands without this script but the two tables at its end. Text goes into the page as text
// alone: nothing here makes markup of what a run said.
(() => {
  const PAGE = 50;
  const LONG = 100;
  const data = JSON.parse(document.getElementById("data").textContent);
  const tables = {};

  const make = (name, attributes = {}, text = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };

  const seconds = (s) => {
    if (s < 0.0005) return s === 0 ? "0 s" : "<1 ms";
    if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
    if (s < 99.95) return `${Number(s.toPrecision(3))} s`;
    if (s < 3600) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
    return `${Math.floor(Math.round(s / 60) / 60)} h ${Math.round(s / 60) % 60} min`;
  };
  const figure = (x) => (Math.abs(x) < 1000 ? x.toFixed(3) : String(Number(x.toPrecision(6))));
  const formats = {
    score: figure,
    mean: (x) => x.toFixed(1),
    count: (x) => x.toLocaleString("en"),
    cost: (x) => (x >= 100 ? `$${x.toFixed(2)}` : `$${x.toFixed(4)}`),
    seconds,
  };

  class Table {
    constructor(section) {
      this.name = section.dataset.table;
      this.columns = data[this.name].columns;
      this.rows = data[this.name].rows;
      this.body = section.querySelector("tbody");
      this.status = section.querySelector("[role=status]");
      this.search = section.querySelector("input[type=search]");
      this.selects = [...section.querySelectorAll("select")];
      this.chip = section.querySelector(".chip");
      this.exact = null;
      this.sort = null;
      this.page = 0;
      this.texts = null;
      this.heads = [...section.querySelectorAll("th")];
      this.heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => this.by(place)));
      this.search.addEventListener("input", () => this.show(0));
      this.selects.forEach((select) => select.addEventListener("change", () => this.show(0)));
      this.chip.addEventListener("click", () => this.only(null));
      [this.back, this.next] = section.querySelectorAll(".pager button");
      this.back.addEventListener("click", () => this.show(this.page - 1));
      this.next.addEventListener("click", () => this.show(this.page + 1));
      section.querySelector("[data-clear]").addEventListener("click", () => this.clear());
      this.show(0);
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

    clear() {
      this.search.value = "";
      this.selects.forEach((select) => { select.value = ""; });
      this.only(null);
    }

    filter(key, value) {
      this.clear();
      const select = this.selects.find((one) => one.dataset.column === key);
      if (select && [...select.options].some((option) => option.value === value)) {
        select.value = value;
        this.show(0);
      } else {
        this.only({ key, value });
      }
    }

    chosen() {
      const wanted = this.selects.filter((one) => one.value).map((one) => [this.place(one.dataset.column), one.value]);
      if (this.exact) wanted.push([this.place(this.exact.key), this.exact.value]);
      const said = this.search.value.trim().toLowerCase();
      if (said && !this.texts) {
        this.texts = this.rows.map((row) => row.filter((cell) => typeof cell === "string").join("\n").toLowerCase());
      }
      const found = [];
      this.rows.forEach((row, at) => {
        if (wanted.every(([place, value]) => row[place] === value) && (!said || this.texts[at].includes(said))) {
          found.push(row);
        }
      });
      return this.sorted(found);
    }

    sorted(rows) {
      if (!this.sort) return rows;
      const { place, down } = this.sort;
      const isNothing = (value) => value === null || value === "";
      return rows.sort((one, other) => {
        const [a, b] = [one[place], other[place]];
        if (isNothing(a) || isNothing(b)) return isNothing(a) - isNothing(b); // what is not known comes last
        const order = a < b ? -1 : Number(a > b);
        return down ? -order : order;
      });
    }

    show(page) {
      const rows = this.chosen();
      const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
      this.page = Math.min(Math.max(0, page), last);
      const begin = this.page * PAGE;
      const shown = rows.slice(begin, begin + PAGE);
      this.body.replaceChildren(...shown.map((row) => this.line(row)));
      const of = rows.length === this.rows.length ? "" : ` (of ${this.rows.length.toLocaleString("en")})`;
      this.status.textContent = rows.length
        ? `${begin + 1}–${begin + shown.length} of ${rows.length.toLocaleString("en")}${of}`
        : `nothing found${of}`;
      this.back.disabled = this.page === 0;
      this.next.disabled = this.page === last;
    }

    line(row) {
      const line = make("tr");
      this.columns.forEach((column, place) => line.append(this.cell(column, row[place])));
      return line;
    }

    cell(column, value) {
      if (column.kind in formats) return make("td", { class: "n" }, value === null ? "–" : formats[column.kind](value));
      const text = value === null ? "" : value;
      const cell = make("td", { class: column.kind });
      if (column.filters && text) {
        const button = make("button", { type: "button", class: "link stranger", dir: "auto" }, text);
        button.addEventListener("click", () => goTo("episodes", column.filters, text));
        cell.append(button);
      } else if (text.length > LONG) {
        const details = make("details");
        const summary = make("summary", { class: "stranger", dir: "auto" }, `${[...text.slice(0, LONG)].join("")}…`);
        details.append(summary, make("span", { class: "stranger", dir: "auto" }, text));
        cell.append(details);
      } else {
        cell.append(make("span", { class: "stranger", dir: "auto" }, text));
      }
      return cell;
    }
  }

  const goTo = (name, key, value) => {
    tables[name].filter(key, value);
    const heading = document.getElementById(name);
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  };

  for (const section of document.querySelectorAll("[data-table]")) {
    section.hidden = false;
    tables[section.dataset.table] = new Table(section);
  }
  for (const button of document.querySelectorAll("button[data-key]")) {
    button.disabled = false;
    button.addEventListener("click", () => goTo("episodes", button.dataset.key, button.dataset.value));
  }
})();
