// The curves of a training run: values under the pointer, and other x axes. Without this script the curves are shown
// over updates.
(() => {
  const X_TICKS = 6;
  let charts = {};
  let axes = {};
  let all = [];
  let axis = null; // of `axes`; null is updates

  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 10000 || value === Math.round(value)) return Math.round(value).toLocaleString("en");
    return size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(3)));
  };
  const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const ticked = (value) => (Math.abs(value) >= 1e6 ? COMPACT.format(value) : short(value));
  const said = (value, isShare) => {
    if (value === null) return "not finite";
    if (!isShare) return short(value);
    const isSmall = value !== 0 && Math.abs(value) < 0.001;
    return `${isSmall ? Number((100 * value).toPrecision(2)) : (100 * value).toFixed(1)}%`;
  };

  // The index of the value nearest to `wanted` in ascending values.
  const nearest = (values, wanted) => {
    let [low, high] = [0, values.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] <= wanted) low = middle;
      else high = middle;
    }
    return wanted - values[low] <= values[high] - wanted ? low : high;
  };

  // Linear interpolation from one ascending list to another.
  const between = (from, to, at) => {
    if (at <= from[0]) return to[0];
    const place = from.findIndex((value) => value >= at);
    if (place < 0) return to[to.length - 1];
    const span = from[place] - from[place - 1];
    return span ? to[place - 1] + ((at - from[place - 1]) / span) * (to[place] - to[place - 1]) : to[place];
  };
  const along = (update) => (axis ? between(axis.u, axis.v, update) : update);
  const back = (value) => (axis ? between(axis.v, axis.u, value) : value);

  const ticks = (low, high) => {
    const wanted = (high - low) / X_TICKS;
    if (!(wanted > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= wanted * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9) || 0; place * step <= high + 1e-9; place += 1) found.push(place * step);
    return axis ? found : found.filter((one) => Math.abs(one - Math.round(one)) < 1e-9);
  };

  class Chart {
    constructor(svg) {
      this.svg = svg;
      this.data = charts[svg.dataset.chart];
      this.readout = document.querySelector(`[data-readout="${svg.dataset.chart}"]`);
      this.updates = [...new Set(this.data.lines.flatMap((line) => line.u))].sort((a, b) => a - b);
      this.at = null;
      const [, top, , bottom] = this.data.box;
      this.cursor = RK.svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
      svg.append(this.cursor);
      svg.setAttribute("tabindex", "0");
      svg.addEventListener("pointermove", (event) => this.point(event));
      svg.addEventListener("pointerleave", () => this.show(null));
      svg.addEventListener("blur", () => this.show(null));
      svg.addEventListener("keydown", (event) => this.key(event));
    }

    x(update) {
      const [left, , right] = this.data.box;
      const [begin, end] = this.data.updates.map(along);
      return end > begin ? left + ((along(update) - begin) / (end - begin)) * (right - left) : (left + right) / 2;
    }

    y(value) {
      const [, top, , bottom] = this.data.box;
      const [low, high, isLog] = this.data.scale;
      const on = isLog ? Math.log10 : Number;
      const share = high > low ? (on(value) - on(low)) / (on(high) - on(low)) : 0.5;
      return bottom - Math.min(1, Math.max(0, share)) * (bottom - top);
    }

    point(event) {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
      const [left, , right] = this.data.box;
      const [begin, end] = this.data.updates.map(along);
      const value = begin + Math.min(1, Math.max(0, (place.x - left) / (right - left))) * (end - begin);
      this.show(nearest(this.updates, back(value)));
    }

    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const from = this.at ?? (step > 0 ? -1 : this.updates.length);
      this.show(Math.min(this.updates.length - 1, Math.max(0, from + step)));
    }

    show(place) {
      this.at = place;
      this.cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
      if (place === null) {
        this.readout.textContent = "";
        return;
      }
      const update = this.updates[place];
      this.cursor.setAttribute("x1", this.x(update));
      this.cursor.setAttribute("x2", this.x(update));
      const parts = this.data.lines.map((line) => {
        const at = nearest(line.u, update);
        const when = line.u[at] === update ? "" : ` (update ${RK.count(line.u[at])})`;
        const within = line.low && line.v[at] !== null
          ? ` (${said(line.low[at], this.data.share)} to ${said(line.high[at], this.data.share)})` : "";
        return `${line.label} ${said(line.v[at], this.data.share)}${within}${when}`;
      });
      const reached = axis ? `, ${short(along(update))} ${axis.name}` : "";
      this.readout.textContent = `Update ${RK.count(update)}${reached}: ${parts.join(" · ")}`;
    }

    redraw() {
      const place = (update, value) => `${this.x(update).toFixed(1)} ${this.y(value).toFixed(1)}`;
      this.data.lines.forEach((line, number) => {
        let begins = true;
        const parts = line.v.map((value, at) => {
          const part = value === null ? "" : `${begins ? "M" : "L"}${place(line.u[at], value)}`;
          begins = value === null;
          return part;
        });
        this.svg.querySelector(`[data-line="${number}"]`).setAttribute("d", parts.join(""));
        const finite = line.u.filter((_, at) => line.v[at] !== null);
        const dots = this.svg.querySelectorAll(`[data-dots="${number}"] circle`);
        dots.forEach((dot, at) => dot.setAttribute("cx", this.x(finite[at]).toFixed(1)));
      });
      const area = (selector, rows) => {
        if (rows.length < 2) return;
        const above = rows.map(([update, , high]) => place(update, high));
        const below = rows.map(([update, low]) => place(update, low)).reverse();
        this.svg.querySelector(selector).setAttribute("d", `M${[...above, ...below].join("L")}Z`);
      };
      area(".band", this.data.band);
      this.data.lines.forEach((line, number) => {
        const rows = (line.low ?? []).map((low, at) => [line.u[at], low, line.high[at]]);
        area(`[data-extremes="${number}"]`, rows.filter((row) => row[1] !== null));
      });
      const [, top, , bottom] = this.data.box;
      for (const mark of this.svg.querySelectorAll("[data-update]")) {
        mark.setAttribute("d", `M${this.x(Number(mark.dataset.update)).toFixed(1)} ${top}V${bottom}`);
      }
      this.drawTicks(bottom + 15);
    }

    drawTicks(y) {
      const [left, , right] = this.data.box;
      const [begin, end] = this.data.updates.map(along);
      const at = (value) => (end > begin ? left + ((value - begin) / (end - begin)) * (right - left) : (left + right) / 2);
      const texts = ticks(begin, end).map((tick) => RK.svg("text", { x: at(tick), y, "text-anchor": "middle" }, ticked(tick)));
      this.svg.querySelector("[data-ticks]").replaceChildren(...texts);
    }
  }

  const select = () => document.querySelector("[data-axis] select");

  const choose = (name) => {
    axis = axes[name] ? { name, ...axes[name] } : null;
    for (const chart of all) chart.redraw();
  };

  const begin = (data) => {
    charts = data.charts ?? {};
    axes = data.axes ?? {};
    all = [...document.querySelectorAll("svg[data-chart]")].map((svg) => new Chart(svg));
    const names = ["updates", ...Object.keys(axes)];
    const chosen = axis && axes[axis.name] ? axis.name : "updates";
    select().replaceChildren(...names.map((name) => RK.el("option", { value: name, selected: name === chosen }, name)));
    document.querySelector("[data-axis]").hidden = names.length < 2 || !all.length;
    if (axis) choose(chosen);
  };

  RK.register("training", () => {
    begin(RK.data);
    select().addEventListener("change", () => choose(select().value));
  });

  // The live parts of the page were replaced.
  RK.swapped = (fresh) => begin(JSON.parse(fresh.getElementById("data").textContent));
})();
