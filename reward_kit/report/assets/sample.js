// The transcripts of a sample side by side: one column per policy, or per episode of one policy.
(() => {
  const { el } = RK;
  const MANY = 6; // columns loaded at a time

  const episodesOf = (sample, policy) => {
    const table = RK.tables.episodes;
    const [id, ofSample, ofPolicy, score, outcome] = ["rollout", "sample", "policy", "score", "outcome"].map((key) =>
      table.place(key),
    );
    return table.rows
      .filter((row) => RK.stored(row[ofSample]) === sample)
      .map((row) => ({
        id: RK.stored(row[id]),
        policy: RK.stored(row[ofPolicy]),
        score: row[score],
        outcome: row[outcome],
      }))
      .filter((one) => policy === undefined || one.policy === policy);
  };

  const columnsOf = (episodes, policy) => {
    if (policy !== undefined) return episodes.map((one) => [one]);
    const names = [...new Set(episodes.map((one) => one.policy))].sort();
    return names.map((name) => episodes.filter((one) => one.policy === name));
  };

  const scoreOf = ({ score, outcome }) => (score === null ? outcome : `${RK.figure(score)} ${outcome}`);

  const transcript = async (body, { id }) => {
    body.replaceChildren(el("p", { class: "faint", role: "status" }, "Loading the episode …"));
    try {
      const episode = await RK.episode(id);
      const error = episode.error ? el("p", { class: "failure stranger" }, `${episode.error}: ${RK.shown(episode.error_message ?? "", 2000)}`) : null;
      const messages = episode.messages.length ? RK.chat(episode.messages) : el("p", { class: "faint" }, "No messages.");
      const end = el("p", { class: "the-end" }, "stop reason: ", el("span", { class: "stranger" }, episode.stop));
      const reason = episode.reason ? el("div", { class: "faint" }, RK.folded(episode.reason, undefined, "reason")) : null;
      body.replaceChildren(...[messages, error, end, reason].flat().filter(Boolean));
    } catch (failure) {
      body.replaceChildren(el("p", { class: "problem stranger" }, failure.message));
    }
  };

  const column = (episodes) => {
    const title = el("h3", { class: "stranger", dir: "auto" }, episodes[0].policy);
    const about = el("p", { class: "versus-about" });
    const body = el("div", { class: "versus-body" });
    const open = (one) => {
      about.replaceChildren(
        ...(select ? [select] : []),
        el("span", { class: one.outcome === "error" ? "bad" : null }, scoreOf(one)),
        el("a", { href: RK.href("episode", one.id), title: one.id }, "steps"),
      );
      return transcript(body, one);
    };
    const options = episodes.map((one, place) =>
      el("option", { value: place }, `${place + 1} of ${episodes.length}: ${scoreOf(one)}`),
    );
    const onchange = ({ target }) => open(episodes[Number(target.value)]);
    const select = episodes.length > 1 ? el("select", { "aria-label": "episode", onchange }, options) : null;
    open(episodes[0]);
    return el("section", { class: "versus-column", "aria-label": episodes[0].policy }, title, about, body);
  };

  RK.view("sample", async (container, [sample, policy]) => {
    const episodes = episodesOf(sample, policy);
    if (!episodes.length) throw new Error(`This run has no episode of sample ${RK.shown(sample, 200)}.`);
    const columns = columnsOf(episodes, policy);
    const board = el("div", { class: "versus" });
    const more = el("button", { type: "button" });
    const add = () => {
      const at = board.children.length;
      board.append(...columns.slice(at, at + MANY).map(column));
      const rest = columns.length - board.children.length;
      more.hidden = rest === 0;
      more.textContent = `show ${Math.min(MANY, rest)} of ${RK.count(rest)} more`;
    };
    more.addEventListener("click", add);
    add();
    const rows = RK.matrix?.rows ?? [];
    const at = rows.findIndex((one) => one.name === sample);
    const link = (row, text, key) =>
      row
        ? el("a", { class: "button", href: RK.href("sample", row.name, ...(policy === undefined ? [] : [policy])), title: `key ${key}` }, text)
        : el("span", { class: "faint off" }, text);
    const [before, after] = at < 0 ? [null, null] : [rows[at - 1], rows[at + 1]];
    const heading = el("h2", { tabindex: -1, class: "stranger", dir: "auto" }, sample);
    container.replaceChildren(
      el(
        "nav",
        { class: "topbar", "aria-label": "Samples" },
        el("a", { class: "button", href: "#", title: "key Esc" }, "Overview"),
        link(before, "← previous", "p"),
        link(after, "next →", "n"),
        el("span", { class: "faint keys" }, "Keys: n p samples, Esc back"),
      ),
      el(
        "p",
        { class: "faint crumbs" },
        policy === undefined ? "sample, all policies" : ["sample, episodes of one policy · ", el("a", { href: RK.href("sample", sample) }, "all policies")],
      ),
      heading,
      board,
      el("p", null, more),
    );
    document.title = `${RK.shown(sample, 60)} · reward-kit`;
    const open = (row) => () => {
      if (row) RK.go(RK.href("sample", row.name, ...(policy === undefined ? [] : [policy])));
    };
    RK.setKeys({ n: open(after), p: open(before), Escape: () => RK.go("#") });
    window.scrollTo(0, 0);
    heading.focus({ preventScroll: true });
  });
})();
