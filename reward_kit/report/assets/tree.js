// The whole group in one diagram. Each lane is an episode, each cell a step, coloured by its credit. Lanes run together
// while the episodes are in one state, split where they act differently, and meet again in shared states.
(() => {
  const AHEAD = 700; // pixels drawn beyond the visible part
  const LEAST = 0.8; // smallest scale to fit a diagram that is slightly too wide
  const MANY = 24; // lanes shown at first
  const FIELDS = [
    ["peer", "peers in the same state"], ["A", "A, the advantage"], ["A_S", "A_S, step part"], ["A_E", "A_E, episode part"],
    ["ret", "G, return from this step on"], ["reward", "reward of the step"],
  ];
  const choice = { field: "peer", all: false, whole: false }; // kept from step to step
  const trees = new WeakMap(); // container -> diagram
  const placed = new WeakMap(); // group -> layout
  const { el, svg } = RK;
  const { CELL } = RK.TreePlaces;

  const round = (x) => Math.round(x * 10) / 10;
  const isNumber = (value) => typeof value === "number";
  // The largest absolute value of a field over all steps; 0 if none.
  const largest = (group, field) => group.episodes.reduce((most, one) => one.steps.reduce(
    (larger, step) => (isNumber(step[field]) ? Math.max(larger, Math.abs(step[field])) : larger), most), 0);

  // The displayed lanes of a large group: the selected one, and others evenly from best to worst.
  const chosen = (group, own) => {
    const all = group.episodes.map((_, place) => place);
    if (all.length <= MANY || choice.all) return all;
    const score = (place) => group.episodes[place].score ?? -Infinity;
    const others = all.filter((place) => place !== own).sort((a, b) => score(b) - score(a) || a - b);
    const some = Array.from({ length: MANY - 1 }, (_, place) => others[Math.floor((place * others.length) / (MANY - 1))]);
    return [own, ...some].sort((a, b) => a - b);
  };

  // A layout is reused for every step of the group.
  const placesOf = (group, shown, names) => {
    const key = shown.join();
    if (placed.get(group)?.key !== key) placed.set(group, { key, places: new RK.TreePlaces(group, shown, names) });
    return placed.get(group).places;
  };

  class Tree {
    constructor(container, group) {
      this.container = container;
      this.group = group;
      this.names = RK.actionNames(group);
      // Hide a part of the advantage that is 0 everywhere, such as A_S with many estimators. Equal episodes get no color.
      this.fields = FIELDS.filter(([key]) => key === "peer" || (!group.is_tied && largest(group, key) > 0));
    }

    build(own, step) {
      this.at = [own, step];
      this.field = this.fields.some(([key]) => key === choice.field) ? choice.field : this.fields[0][0];
      this.most = largest(this.group, this.field);
      this.shown = chosen(this.group, own);
      this.places = placesOf(this.group, this.shown, this.names);
      this.panel = RK.treePanel(this.group, this.names);
      this.view = el("div", { class: "tree-view", onscroll: () => this.draw() }, this.canvas());
      const words = RK.treeWords(this.group, this.names);
      this.container.replaceChildren(el("div", { class: "tree" }, RK.treeCaption(this.group), this.head(), this.view, this.panel.element, words));
      this.resize();
      this.bringIntoView(...this.at);
      this.move(step);
    }

    canvas() {
      const told = "Lanes are episodes, cells are steps. Arrow keys move along and across lanes, Enter opens a step.";
      this.root = svg("svg", {
        viewBox: `0 0 ${this.places.width} ${this.places.height}`, role: "group", "aria-label": told,
        onkeydown: (event) => this.key(event), onfocusin: (event) => this.lookAt(event.target),
        onmouseover: (event) => this.lookAt(event.target), onmouseleave: () => this.look(...this.at),
        onclick: (event) => this.open(this.placeOf(event.target)),
      });
      this.layers = ["lanes", "stations", "labels", "cells", "marks"].map(() => this.root.appendChild(svg("g")));
      this.drawn = new Set();
      this.ways = new Set();
      this.cells = new Map();
      return this.root;
    }

    resize() {
      const { width, height } = this.places;
      const fitting = Math.min(1, (this.view.clientWidth - 2) / width);
      this.scale = fitting > 0 && (choice.whole || fitting >= LEAST) ? fitting : 1;
      this.root.setAttribute("width", Math.floor(width * this.scale));
      this.root.setAttribute("height", Math.ceil(height * this.scale));
    }

    // Drawing the visible part

    draw() {
      const { x, columns, width } = this.places;
      const from = this.view.scrollLeft / this.scale - AHEAD;
      const to = (this.view.scrollLeft + this.view.clientWidth) / this.scale + AHEAD;
      for (let column = 0; column < columns; column += 1) {
        const end = column + 1 < columns ? x[column + 1] : width;
        if (end < from || x[column] > to || this.drawn.has(column)) continue;
        this.drawn.add(column);
        this.drawColumn(column);
      }
    }

    drawColumn(column) {
      const [, stations, labels, cells] = this.layers;
      for (const label of this.places.labels[column]) labels.append(this.label(label, column));
      for (const item of this.places.items[column]) {
        if (item.kind === "node" && item.lanes.length > 1) stations.append(this.station(item, column));
        for (const lane of item.lanes) {
          if (item.kind === "node") cells.append(this.cell(lane, this.places.steps[lane][column]));
          if (item.kind === "end" && (!column || this.places.itemOf[lane][column - 1]?.kind !== "end")) cells.append(this.end(lane, column));
          this.drawWay(lane, column);
        }
      }
    }

    // The lane of a step leading into a column.
    drawWay(lane, column) {
      const step = this.places.before[lane][column];
      const key = `${lane} ${step}`;
      if (step < 0 || this.ways.has(key)) return;
      this.ways.add(key);
      const d = this.places.way(lane, step);
      const isOwn = this.shown[lane] === this.at[0];
      if (isOwn) this.layers[0].append(svg("path", { class: "rim", d }));
      const way = svg("path", { class: `lane ${RK.heat(this.value(this.shown[lane], step), this.most)}${isOwn ? " own" : ""}`, d });
      if (isOwn) this.layers[0].append(way);
      else this.layers[0].prepend(way); // the selected lane is on top
    }

    label(label, column) {
      const own = label.lanes.find((lane) => this.shown[lane] === this.at[0]);
      const ys = (own === undefined ? label.lanes : [own]).map((lane) => this.places.y(lane, column));
      const y = round((Math.min(...ys) + Math.max(...ys)) / 2 + 4);
      return svg("text", { class: own === undefined ? "label" : "label own", x: this.places.x[column] - 7, y, "text-anchor": "end" }, label.text);
    }

    station(item, column) {
      const height = item.size + 6;
      const y = round(item.y + this.places.top - height / 2);
      return svg("rect", { class: "station", x: this.places.x[column] - 4, y, width: CELL.width + 8, height, rx: 8 });
    }

    cell(lane, step) {
      const episode = this.shown[lane];
      const told = this.panel.told(episode, step);
      const cell = svg("g", {
        class: episode === this.at[0] ? "cell own" : "cell", role: "link", tabindex: "-1", "aria-label": told, data: { place: `${episode} ${step}` },
      }, RK.heatBox(this.value(episode, step), this.most, this.places.cell(lane, step)), svg("title", null, told));
      this.cells.set(`${episode} ${step}`, cell);
      return cell;
    }

    end(lane, column) {
      const [x, y] = [this.places.x[column] + 1, this.places.y(lane, column)];
      return svg("g", null, svg("path", { class: "endline", d: `M${x},${y - 8}V${y + 8}` }),
        svg("text", { class: "end", x: x + 7, y: y + 4 }, RK.scoreText(this.group.episodes[this.shown[lane]]),
          svg("tspan", { dx: 6 }, `#${RK.numberOf(this.group, this.shown[lane])}`)));
    }

    value(episode, step) {
      return this.group.episodes[episode].steps[step]?.[this.field];
    }

    // Selection

    // Select another step of the episode.
    move(step) {
      this.at = [this.at[0], step];
      this.bringIntoView(...this.at);
      this.draw();
      this.tab(...this.at);
      this.look(...this.at);
    }

    place(episode, step) {
      const lane = this.shown.indexOf(episode);
      return this.places.nodeOf[lane]?.[step] ? this.places.cell(lane, step) : null;
    }

    bringIntoView(episode, step) {
      const place = this.place(episode, step);
      const [left, width] = [this.view.scrollLeft, this.view.clientWidth];
      if (place && (place.x * this.scale < left + 40 || place.x * this.scale > left + width - 110)) {
        this.view.scrollLeft = place.x * this.scale - width / 2;
      }
    }

    tab(episode, step) {
      this.tabbed?.setAttribute("tabindex", "-1");
      this.tabbed = this.cells.get(`${episode} ${step}`) ?? this.cells.values().next().value;
      this.tabbed?.setAttribute("tabindex", "0");
    }

    look(episode, step) {
      this.panel.show(episode, step);
      const [marks, own] = [this.layers[4], this.place(...this.at)];
      marks.replaceChildren(...this.together(episode, step).map((box) => svg("rect", { class: "peer", ...box, rx: 9 })));
      if (!own) return;
      marks.append(svg("rect", { class: "ring", x: own.x - 3, y: own.y - 3, width: CELL.width + 6, height: CELL.height + 6, rx: 6 }));
    }

    // Boxes around the cells of a step's state; neighbours share a box.
    together(episode, step) {
      const peers = this.group.episodes[episode]?.steps[step]?.peers ?? [];
      const places = peers.length ? [[episode, step], ...peers].map((peer) => this.place(...peer)).filter(Boolean) : [];
      places.sort((a, b) => a.x - b.x || a.y - b.y);
      const boxes = [];
      for (const { x, y } of places) {
        const last = boxes[boxes.length - 1];
        if (last && last.x === x - 5 && y < last.y + last.height) last.height = y + CELL.height + 4 - last.y;
        else boxes.push({ x: x - 5, y: y - 4, width: CELL.width + 10, height: CELL.height + 8 });
      }
      return boxes;
    }

    placeOf(element) {
      return element.closest?.(".cell")?.dataset.place?.split(" ").map(Number) ?? null;
    }

    lookAt(element) {
      const place = this.placeOf(element);
      if (place) this.look(...place);
    }

    open(place) {
      if (place) RK.go(RK.href("episode", this.group.episodes[place[0]].id, place[1]));
    }

    key(event) {
      const at = this.placeOf(event.target);
      if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
      const to = this.after(event.key, at);
      if (!to && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      if (to) this.focus(...to);
      else this.open(at);
    }

    after(key, [episode, step]) {
      const last = this.group.episodes[episode].steps.length - 1;
      const along = { ArrowLeft: Math.max(0, step - 1), ArrowRight: Math.min(last, step + 1), Home: 0, End: last }[key];
      if (along !== undefined) return [episode, along];
      if (key !== "ArrowUp" && key !== "ArrowDown") return null;
      const { x, y } = this.place(episode, step);
      const sign = key === "ArrowUp" ? -1 : 1;
      const near = this.shown.filter((other) => other !== episode).map((other) => this.nearest(other, x)).filter(Boolean)
        .map((found) => ({ ...found, below: (found.y - y) * sign })).filter((found) => found.below > 0);
      near.sort((a, b) => a.below - b.below);
      return near.length ? near[0].place : [episode, step];
    }

    // The step of an episode nearest to a column.
    nearest(episode, x) {
      const all = this.group.episodes[episode].steps.map((_, step) => ({ ...this.place(episode, step), place: [episode, step] }));
      return all.sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
    }

    focus(episode, step) {
      this.bringIntoView(episode, step);
      this.draw();
      this.tab(episode, step);
      this.tabbed.focus({ preventScroll: true });
    }

    // Controls above the diagram

    head() {
      const options = this.fields.map(([key, name]) => el("option", { value: key, selected: key === this.field }, name));
      const again = (change) => (event) => {
        change(event.target);
        this.build(...this.at);
        this.container.querySelector(`[data-control=${event.target.dataset.control}]`)?.focus();
      };
      const [all, some] = [this.group.episodes.length, this.shown.length];
      const more = choice.all ? `all ${all} episodes: show fewer` : `${some} of ${all} episodes, from best to worst: show all`;
      return el("div", { class: "tree-head" }, this.most ? RK.treeScale(this.most, this.field) : el("span"), el("div", null,
        all > MANY ? el("button", { type: "button", data: { control: "all" }, onclick: again(() => { choice.all = !choice.all; }) }, more) : null,
        el("label", null, el("input", { type: "checkbox", checked: choice.whole, data: { control: "whole" }, onchange: again((box) => { choice.whole = box.checked; }) }), "full width"),
        options.length > 1 && el("label", null, "color", el("select", { data: { control: "field" }, onchange: again((box) => { choice.field = box.value; }) }, options))));
    }
  }

  // The most decisive step: the best in the state with the largest difference from peers between actions.
  const crossroads = (group) => {
    const found = group.anchors.filter((anchor) => anchor.actions.length > 1).map((anchor) => {
      const sorted = anchor.actions.filter((one) => one.mean_peer !== null).sort((a, b) => b.mean_peer - a.mean_peer);
      return { place: sorted[0]?.members[0], spread: sorted.length ? sorted[0].mean_peer - sorted.at(-1).mean_peer : -1 };
    });
    found.sort((a, b) => b.spread - a.spread);
    return found.find((one) => one.place)?.place ?? [group.episodes.findIndex((one) => one.steps.length), 0];
  };

  // Without an episode, start at the most decisive state.
  RK.tree = (container, group, episodeIndex, stepIndex) => {
    if (episodeIndex === undefined || episodeIndex === null) return RK.tree(container, group, ...crossroads(group));
    const step = stepIndex ?? 0;
    const known = trees.get(container);
    if (known && known.group === group && known.at[0] === episodeIndex && known.root.isConnected) return known.move(step);
    const tree = new Tree(container, group);
    trees.set(container, tree);
    tree.build(episodeIndex, step);
  };
})();
