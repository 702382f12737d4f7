// The episodes of the page: stored lines, loaded on demand. A chunk is text with a line for each stored line, after a
// letter: E an episode, then its S score, C credit and V success probabilities; G, sent only by a server, says which
// part of a large group follows.
(() => {
  const index = RK.read("index");

  // Index

  const parts = new Map(); // of groups: {id, size, first, ids, chunk, at}
  const placeOf = new Map(); // episode -> its part
  (index.chunks ?? []).forEach((groups, chunk) => {
    let at = 0;
    for (const [id, size, first, ids] of groups) {
      const part = { id, size, first, ids, chunk, at };
      at += ids.length;
      parts.set(id, [...(parts.get(id) ?? []), part]);
      for (const one of ids) placeOf.set(one, part);
    }
  });

  const asked = new Map(); // chunk or fetched address -> promise of its stored episodes
  const waiting = new Map(); // chunk -> callbacks for its script
  const groups = new Map(); // part -> promise of the group
  const fetched = new Map(); // episode -> promise of its group, from a server

  const scriptOf = (chunk) =>
    new Promise((resolve, reject) => {
      const src = `${index.folder}/${chunk}.js`;
      const script = document.createElement("script");
      waiting.set(chunk, resolve);
      script.src = src;
      script.onerror = () =>
        reject(
          new Error(
            `${src} cannot be loaded. The episodes of this run are in a folder beside the page: keep them together.`,
          ),
        );
      document.head.append(script);
    });
  const take = (chunk, text) => waiting.get(chunk)?.(text);

  const once = (map, key, make) => {
    if (!map.has(key)) {
      const made = make();
      map.set(key, made);
      made.catch(() => map.delete(key)); // retry on the next request
    }
    return map.get(key);
  };

  const textOf = async (chunk) => {
    if (index.mode === "files") return scriptOf(chunk);
    return document.querySelector(`script[data-chunk="${chunk}"]`).textContent;
  };

  const parsed = (text) => {
    try {
      return JSON.parse(text);
    } catch {
      return null; // a damaged line must not hide the others
    }
  };

  // The stored episodes of a chunk: {record, score, credit}, and the server's data about their group.
  const storedIn = (text) => {
    const stored = [];
    let told = {};
    for (const line of text.split("\n")) {
      const value = line ? parsed(line.slice(1)) : null;
      if (line[0] === "E") stored.push({ record: value, score: null, credit: [], curves: [] });
      else if (line[0] === "S") stored.at(-1).score = value;
      else if (line[0] === "C") stored.at(-1).credit = value ?? [];
      else if (line[0] === "V") stored.at(-1).curves = value ?? [];
      else if (line[0] === "G") told = value ?? {};
    }
    return { stored, told };
  };

  const groupOfPart = (part) =>
    once(groups, part, async () => {
      const { stored } = await once(asked, part.chunk, async () => storedIn(await textOf(part.chunk)));
      const own = stored.slice(part.at, part.at + part.ids.length);
      if (own.length < part.ids.length)
        throw new Error("The folder beside this page belongs to a different version of the page. Reload the page.");
      return RK.groupOf(part.id, part.size, part.first, part.ids, own);
    });

  const groupFrom = async (path) => {
    const answer = await fetch(path, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}: ${(await answer.text()).slice(0, 300)}`);
    const { stored, told } = storedIn(await answer.text());
    if (!stored.length) throw new Error("The server has no such episode.");
    const ids = stored.map(({ record }, place) => record?.rollout_id ?? `?${place}`);
    const id = RK.plainText(stored.find(({ record }) => record)?.record.group_id) || ids[0];
    return RK.groupOf(id, told.size ?? ids.length, told.first ?? 0, ids, stored);
  };

  const group = (id, around) => {
    if (index.mode === "server") {
      return around === undefined
        ? once(fetched, `group/${id}`, () => groupFrom(`group/${encodeURIComponent(id)}`))
        : once(fetched, around, () => groupFrom(`episode/${encodeURIComponent(around)}`));
    }
    const known = parts.get(id);
    if (!known) return Promise.reject(new Error(`This run has no group ${id}.`));
    return groupOfPart(known.find((part) => part.ids.includes(around)) ?? known[0]);
  };

  const groupWith = async (id) => {
    if (index.mode === "server") return group(null, id);
    const part = placeOf.get(id);
    if (!part) throw new Error(`This run has no episode ${id}.`);
    return groupOfPart(part);
  };
  const episode = async (id) => (await groupWith(id)).episodes.find((one) => one.id === id);

  const forget = () => fetched.clear();

  Object.assign(RK, { episode, forget, group, groupWith, mode: index.mode, take });
})();
