// Layout of a group's diagram, without drawing. Episodes with equal beginnings run together: they share nodes in a trie
// of their states. After they split, states that occur in the same order in several episodes are aligned, so that the
// episodes meet again. A lane is an episode; a column holds states above each other.
(() => {
  const CELL = { width: 18, height: 14 };
  const PITCH = 16; // from lane to lane within one state
  const GAP = 14; // between states of one column
  const CURVE = { least: 26, most: 64 }; // width in which lanes change height
  const MARGIN = { left: 14, top: 12, right: 56, bottom: 12 };
  const LETTER = 7.1; // approximate width of a letter in labels
  const LONGEST = 22; // letters of a label
  const round = (x) => Math.round(x * 10) / 10;
  const ALONE = 0.9; // cost of a single meeting: a run of meetings justifies a detour, a chance meeting hardly does
  const STRETCH = 1.5; // times the longest episode: ignore meetings that would make the diagram longer
  const EFFORT = 4e6; // lane comparisons when searching for a good order
  const MOST = 600000; // pairs of step and node when aligning one episode; beyond, it stays apart

  // The path of one episode along known nodes, as long as its states start another episode. `ways` is a trie of states:
  // {node, after: state -> the same}.
  const alongTrie = (ways, keys) => {
    const way = [];
    for (let at = ways; way.length < keys.length && at.after.has(keys[way.length]);) {
      at = at.after.get(keys[way.length]);
      way.push(at.node);
    }
    return way;
  };

  // The best chain of meetings that ends with this one.
  const longer = (best, matched, { step, place, node, last }) => {
    const earlier = place ? best[place - 1] : null;
    let chain = { step, place, node, before: earlier, worth: 1 - ALONE + (earlier ? earlier.worth : 0) };
    if (last && last.next.has(node)) chain.worth = 1;
    for (const before of matched) {
      if (before.place < place && before.worth + 1 > chain.worth && before.node.next.has(node)) {
        chain = { step, place, node, before, worth: before.worth + 1 };
      }
    }
    return chain;
  };

  // The nodes that the rest of an episode meets, as pairs [step, node]: the heaviest common subsequence of its states and
  // the nodes in column order. Consecutive meetings weigh more.
  const meetings = (graph, keys, way) => {
    const begin = way.length;
    const last = begin ? way[begin - 1] : null;
    const wanted = new Set(keys.slice(begin));
    const nodes = graph.nodes
      .filter((node) => wanted.has(node.key) && !(last && node.column <= last.column))
      .sort((a, b) => a.column - b.column || a.id - b.id);
    const wide = nodes.length;
    if (!wide || (keys.length - begin) * wide > MOST) return [];
    const places = new Map();
    nodes.forEach((node, place) => {
      if (!places.has(node.key)) places.set(node.key, []);
      places.get(node.key).push(place);
    });
    let matched = []; // chains of meetings that end at the previous step
    const best = new Array(wide).fill(null); // by index: the best chain so far that ends there or before
    for (let step = begin; step < keys.length; step += 1) {
      const found = (places.get(keys[step]) ?? []).map((place) => longer(best, matched, { step, place, node: nodes[place], last: step === begin ? last : null }));
      if (!found.length) {
        matched = found;
        continue;
      }
      let [most, number] = [null, 0];
      for (let place = found[0].place; place < wide; place += 1) {
        if (number < found.length && found[number].place === place) {
          if (!most || found[number].worth > most.worth) most = found[number];
          number += 1;
        }
        if (best[place] && (!most || best[place].worth >= most.worth)) most = best[place];
        else best[place] = most;
      }
      matched = found;
    }
    const pairs = [];
    for (let chain = best[wide - 1]; chain; chain = chain.before) pairs.unshift([chain.step, chain.node]);
    return pairs;
  };

  // Keep meetings that do not push existing nodes too far right.
  const fitting = (graph, way, pairs, length) => {
    const columns = graph.nodes.reduce((most, node) => Math.max(most, node.column + 1), 0);
    let at = way.length ? way[way.length - 1].column : -1;
    let before = way.length - 1;
    return pairs.filter(([step, node]) => {
      const column = at + step - before; // the column of the episode without meetings
      const end = Math.max(columns + column - node.column, node.column + length - step);
      if (end > graph.most) return false;
      [at, before] = [Math.max(column, node.column), step];
      return true;
    });
  };

  const addEpisode = (graph, episode, keys) => {
    const way = alongTrie(graph.ways, keys);
    const known = new Map(fitting(graph, way, meetings(graph, keys, way), keys.length));
    let at = graph.ways;
    keys.forEach((key, step) => {
      let node = way[step] ?? known.get(step);
      if (!node) {
        node = { id: graph.nodes.length, key, column: 0, members: [], next: new Set() };
        graph.nodes.push(node);
      }
      at.node?.next.add(node);
      node.members.push([episode, step]);
      if (!at.after.has(key)) at.after.set(key, { node, after: new Map() });
      at = at.after.get(key);
    });
    layer(graph.nodes);
  };

  // A node is one column after the last of its predecessors, so every arrow points right.
  const layer = (nodes) => {
    const waits = new Map(nodes.map((node) => [node, 0]));
    for (const node of nodes) {
      node.column = 0;
      for (const after of node.next) waits.set(after, waits.get(after) + 1);
    }
    const ready = nodes.filter((node) => waits.get(node) === 0);
    for (let at = 0; at < ready.length; at += 1) {
      for (const after of ready[at].next) {
        after.column = Math.max(after.column, ready[at].column + 1);
        waits.set(after, waits.get(after) - 1);
        if (waits.get(after) === 0) ready.push(after);
      }
    }
  };

  // Lanes from top to bottom: lanes that split late are neighbours, and the better branch is above.
  const order = (sequences, worth) => {
    const lanes = [];
    const sort = (episodes, step) => {
      if (episodes.length < 2) {
        lanes.push(...episodes);
        return;
      }
      const branches = new Map();
      for (const episode of episodes) {
        const keys = sequences[episode];
        const key = step < keys.length ? keys[step] : null;
        branches.set(key, [...(branches.get(key) || []), episode]);
      }
      const mean = (branch) => branch.reduce((sum, episode) => sum + worth[episode], 0) / branch.length;
      const sorted = [...branches].sort((a, b) => mean(b[1]) - mean(a[1]) || b[1].length - a[1].length);
      for (const [key, branch] of sorted) {
        if (key === null) lanes.push(...branch);
        else sort(branch, step + 1);
      }
    };
    sort(sequences.map((_, episode) => episode), 0);
    return lanes;
  };

  // Order lanes so that those that often share a state are close: move one lane at a time to its best position while that
  // helps. Early steps count most; states shared by all are ignored.
  const settled = (lanes, nodes) => {
    const shared = nodes.map((node) => ({ members: node.members.map(([lane]) => lane), weight: 1 / (4 + node.column) }))
      .filter(({ members }) => members.length > 1 && members.length < lanes.length);
    const size = shared.reduce((sum, { members }) => sum + members.length, 0);
    const row = [];
    const cost = (order) => {
      order.forEach((lane, place) => { row[lane] = place; });
      return shared.reduce((sum, { members, weight }) => {
        let [least, most] = [Infinity, -1];
        for (const lane of members) {
          least = Math.min(least, row[lane]);
          most = Math.max(most, row[lane]);
        }
        return sum + weight * (most - least);
      }, 0);
    };
    let best = { order: lanes, cost: cost(lanes) };
    let tries = Math.min(8 * lanes.length ** 2, EFFORT / (size + lanes.length));
    for (let isBetter = true; isBetter && tries > 0;) {
      isBetter = false;
      for (const lane of lanes) {
        const others = best.order.filter((other) => other !== lane);
        for (let place = 0; place < lanes.length && tries > 0; place += 1, tries -= 1) {
          const order = [...others.slice(0, place), lane, ...others.slice(place)];
          const found = cost(order);
          if (found < best.cost - 1e-9) {
            best = { order, cost: found };
            isBetter = true;
          }
        }
      }
    }
    return best.order;
  };

  // Centres as close as possible to the wanted positions, in order and without overlap: isotonic regression.
  const spread = (items, gap) => {
    const blocks = [];
    let offset = 0;
    items.forEach((item, place) => {
      if (place) offset += (items[place - 1].size + item.size) / 2 + gap;
      let block = { sum: item.wish - offset, count: 1, first: place };
      item.offset = offset;
      while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].count > block.sum / block.count) {
        const above = blocks.pop();
        block = { sum: above.sum + block.sum, count: above.count + block.count, first: above.first };
      }
      blocks.push(block);
    });
    blocks.forEach((block, number) => {
      const end = number + 1 < blocks.length ? blocks[number + 1].first : items.length;
      for (let place = block.first; place < end; place += 1) items[place].y = block.sum / block.count + items[place].offset;
    });
  };

  // The better half above.
  const upright = (lanes, worth) => {
    const middle = (lanes.length - 1) / 2;
    const lean = lanes.reduce((sum, lane, place) => sum + worth[lane] * (place - middle), 0);
    return lean > 0 ? [...lanes].reverse() : lanes;
  };

  // sequences: the state keys of each episode; worth: a number per episode, higher is above.
  // Returns {nodes, nodeOf: node of [episode][step], lanes: episodes from top to bottom, columns}.
  const treeLayout = (sequences, worth) => {
    const longest = Math.max(0, ...sequences.map((keys) => keys.length));
    const graph = { nodes: [], ways: { after: new Map() }, most: Math.max(longest + 6, STRETCH * longest) };
    const lanes = order(sequences, worth);
    const first = [...lanes].sort((a, b) => worth[b] - worth[a] || sequences[a].length - sequences[b].length || a - b);
    for (const episode of first) addEpisode(graph, episode, sequences[episode]);
    const nodeOf = sequences.map((keys) => new Array(keys.length));
    for (const node of graph.nodes) for (const [episode, step] of node.members) nodeOf[episode][step] = node;
    const columns = graph.nodes.reduce((most, node) => Math.max(most, node.column + 1), 0);
    return { nodes: graph.nodes, nodeOf, lanes: upright(settled(lanes, graph.nodes), worth), columns };
  };

  // The items of each column and their positions: states (nodes) with their lanes, passing lanes, and ends.
  class TreePlaces {
    static CELL = CELL;

    // group: with its episodes; shown: which of them are lanes; names: of their actions, [episode][step].
    constructor(group, shown, names) {
      const steps = shown.map((place) => group.episodes[place].steps);
      const keys = steps.map((own, lane) => own.map((step, place) => step.anchor ?? step.key ?? `${lane} ${place}`));
      const least = Math.min(0, ...shown.map((place) => group.episodes[place].score ?? 0)) - 1;
      const layout = treeLayout(keys, shown.map((place) => group.episodes[place].score ?? least));
      this.nodeOf = layout.nodeOf;
      this.names = shown.map((place) => names[place]);
      this.endWidth = LETTER * Math.max(0, ...shown.map((place) => RK.scoreText(group.episodes[place]).length));
      this.columns = layout.columns + 1; // the last column is for the ends
      this.rows = [];
      layout.lanes.forEach((lane, row) => { this.rows[lane] = row; });
      this.items = Array.from({ length: this.columns }, () => new Map());
      this.itemOf = shown.map(() => new Array(this.columns).fill(null));
      this.steps = shown.map(() => new Int32Array(this.columns).fill(-1)); // by column
      this.before = shown.map(() => new Int32Array(this.columns).fill(-1)); // the last step before each column
      shown.forEach((_, lane) => this.run(lane));
      this.items = this.items.map((items) => this.spread([...items.values()]));
      this.measure();
    }

    run(lane) {
      const nodes = this.nodeOf[lane];
      let column = 0;
      nodes.forEach((node, step) => {
        const before = step ? nodes[step - 1].id : -1;
        if (step) for (; column < node.column; column += 1) this.put(column, `${before} ${node.id}`, lane, { kind: "pass" });
        this.put(node.column, `${node.id}`, lane, { kind: "node" });
        column = node.column + 1;
      });
      for (; column < this.columns; column += 1) this.put(column, `end ${lane}`, lane, { kind: "end" });
      nodes.forEach((node, step) => { this.steps[lane][node.column] = step; });
      for (let at = 1; at < this.columns; at += 1) this.before[lane][at] = Math.max(this.before[lane][at - 1], this.steps[lane][at - 1]);
    }

    put(column, key, lane, item) {
      if (!this.items[column].has(key)) this.items[column].set(key, { ...item, lanes: [] });
      this.itemOf[lane][column] = this.items[column].get(key);
      this.itemOf[lane][column].lanes.push(lane);
    }

    spread(items) {
      for (const item of items) {
        item.lanes.sort((a, b) => this.rows[a] - this.rows[b]);
        item.size = item.lanes.length * PITCH;
        item.wish = (item.lanes.reduce((sum, lane) => sum + this.rows[lane], 0) / item.lanes.length) * (PITCH + GAP);
      }
      items.sort((a, b) => a.wish - b.wish || this.rows[a.lanes[0]] - this.rows[b.lanes[0]]);
      spread(items, GAP);
      return items;
    }

    measure() {
      const items = this.items.flat();
      this.top = MARGIN.top - items.reduce((least, item) => Math.min(least, item.y - item.size / 2), 0);
      this.height = Math.ceil(items.reduce((most, item) => Math.max(most, item.y + item.size / 2), 0) + this.top + MARGIN.bottom);
      this.labels = this.items.map((_, column) => (column ? this.labelsBefore(column) : []));
      this.bend = [0];
      this.x = [MARGIN.left];
      for (let column = 1; column < this.columns; column += 1) {
        const widest = Math.max(0, ...this.labels[column].map((label) => label.text.length * LETTER + 10));
        const steep = Math.max(0, ...this.rows.map((_, lane) => Math.abs(this.climb(lane, column))));
        this.bend.push(steep < 1 ? 0 : Math.min(CURVE.most, Math.max(CURVE.least, steep / 2)));
        this.x.push(round(this.x[column - 1] + CELL.width + Math.max(PITCH, this.bend[column] + widest)));
      }
      this.width = Math.ceil(this.x[this.columns - 1] + MARGIN.right + this.endWidth);
    }

    climb(lane, column) {
      const isThere = this.itemOf[lane][column - 1] && this.itemOf[lane][column];
      return isThere ? this.y(lane, column) - this.y(lane, column - 1) : 0;
    }

    y(lane, column) {
      const item = this.itemOf[lane][column];
      return round(item.y + this.top + (item.lanes.indexOf(lane) - (item.lanes.length - 1) / 2) * PITCH);
    }

    // Actions before a column in states of several lanes, once for neighbours with the same action.
    labelsBefore(column) {
      const labels = [];
      for (const item of this.items[column]) {
        let open = null;
        for (const lane of item.lanes) {
          const from = this.itemOf[lane][column - 1];
          const isTold = from?.kind === "node" && from.lanes.length > 1;
          const text = isTold ? this.names[lane][this.steps[lane][column - 1]] : null;
          if (open && text === open.whole && from === open.from) open.lanes.push(lane);
          else {
            open = text === null ? null : { whole: text, text: RK.shown(text.length > LONGEST ? `${RK.cut(text, LONGEST - 1)}…` : text), from, lanes: [lane] };
            if (open) labels.push(open);
          }
        }
      }
      return labels;
    }

    cell(lane, step) {
      const { column } = this.nodeOf[lane][step];
      return { x: this.x[column], y: this.y(lane, column) - CELL.height / 2, ...CELL };
    }

    // The path from the cell of a step to the next one, or to the end.
    way(lane, step) {
      const from = this.nodeOf[lane][step].column;
      const to = this.nodeOf[lane][step + 1]?.column ?? from + 1;
      let y = this.y(lane, from);
      let way = `M${this.x[from] + CELL.width - 2},${y}`;
      for (let column = from + 1; column <= to; column += 1) {
        const next = this.y(lane, column);
        const [begin, end] = [this.x[column - 1] + CELL.width, this.x[column - 1] + CELL.width + this.bend[column]];
        if (next !== y) way += `H${begin}C${(begin + end) / 2},${y} ${(begin + end) / 2},${next} ${end},${next}`;
        y = next;
      }
      return `${way}H${this.x[to] + 2}`;
    }
  }

  Object.assign(RK, { TreePlaces, treeLayout });
})();
