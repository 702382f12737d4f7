// The episodes behind the page: stored lines, opened when somebody asks for them. A chunk of them is text, a line for
// each stored line with a letter before it: E an episode, then its S score and C credit; G, from a server alone, says
// which part of a large group follows.
(() => {
  const index = RK.read("index");

  // Where things are

  const parts = new Map(); // of each group: {id, size, first, ids, chunk, at}
  const placeOf = new Map(); // the part in which an episode is
  (index.chunks ?? []).forEach((groups, chunk) => {
    let at = 0;
    for (const [id, size, first, ids] of groups) {
      const part = { id, size, first, ids, chunk, at };
      at += ids.length;
      parts.set(id, [...(parts.get(id) ?? []), part]);
      for (const one of ids) placeOf.set(one, part);
    }
  });

  const asked = new Map(); // chunk, or what was fetched -> promise of its stored episodes
  const waiting = new Map(); // chunk -> who waits for its script
  const groups = new Map(); // part -> promise of the group
  const fetched = new Map(); // episode -> promise of its group, on a server

  const scriptOf = (chunk) =>
    new Promise((resolve, reject) => {
      const src = `${index.folder}/${chunk}.js`;
      const script = document.createElement("script");
      waiting.set(chunk, resolve);
      script.src = src;
      script.onerror = () =>
        reject(
          new Error(
            `${src} cannot be opened. The episodes of this run lie in a folder beside the page: keep the two together.`,
          ),
        );
      document.head.append(script);
    });
  const take = (chunk, text) => waiting.get(chunk)?.(text);

  const once = (map, key, make) => {
    if (!map.has(key)) {
      const made = make();
      map.set(key, made);
      made.catch(() => map.delete(key)); // the next one tries again
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
      return null; // a damaged line is no reason to show none of the others
    }
  };

  // The stored episodes of a chunk: {record, score, credit}, and what a server says of their group.
  const storedIn = (text) => {
    const stored = [];
    let told = {};
    for (const line of text.split("\n")) {
      const value = line ? parsed(line.slice(1)) : null;
      if (line[0] === "E") stored.push({ record: value, score: null, credit: [] });
      else if (line[0] === "S") stored.at(-1).score = value;
      else if (line[0] === "C") stored.at(-1).credit = value ?? [];
      else if (line[0] === "G") told = value ?? {};
    }
    return { stored, told };
  };

  const groupOfPart = (part) =>
    once(groups, part, async () => {
      const { stored } = await once(asked, part.chunk, async () => storedIn(await textOf(part.chunk)));
      const own = stored.slice(part.at, part.at + part.ids.length);
      if (own.length < part.ids.length)
        throw new Error("The folder beside this page is of another writing of it: load the page again.");
      return RK.groupOf(part.id, part.size, part.first, part.ids, own);
    });

  const groupFrom = async (path) => {
    const answer = await fetch(path, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}: ${(await answer.text()).slice(0, 300)}`);
    const { stored, told } = storedIn(await answer.text());
    if (!stored.length) throw new Error("The server knows no such episode.");
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
