// An episode apart from its conversation: the head before it; its score, sample and credit after it.
(() => {
  const { dollars, el } = RK;
  const MANY_CHANGES = 20; // more are folded

  const aside = (title, text) =>
    el(
      "details",
      { class: "fold aside" },
      el("summary", null, title),
      el("div", { class: "said drawn stranger", dir: "auto" }, RK.shown(text, 20000)),
    );

  const crumbs = (episode, group) => {
    const place = `${group.first + episode.index + 1} of ${RK.count(group.size)} in its group`;
    return el(
      "p",
      { class: "faint crumbs" },
      "sample ",
      el("span", { class: "stranger", dir: "auto" }, episode.sample),
      " · ",
      el("a", { href: RK.href("group", group.id) }, group.size > 1 ? place : "alone in its group"),
    );
  };

  const outcome = (episode, kind) => [
    el(
      "span",
      { class: episode.score === null ? `${kind} unscored` : kind },
      episode.score === null ? "unscored" : RK.figure(episode.score),
    ),
    episode.is_imputed ? el("span", { class: "tag" }, "imputed") : null,
    episode.error ? el("span", { class: "tag bad" }, `error: ${episode.error}`) : null,
  ];

  const counted = (tokens) => (tokens === null ? RK.DASH : RK.count(tokens));

  // The parts of the tokens that are known and not 0.
  const parts = ({ cached, cache_write: written, reasoning }) =>
    [
      cached ? `${RK.count(cached)} cached` : null,
      written ? `${RK.count(written)} cache write` : null,
      reasoning ? `${RK.count(reasoning)} reasoning` : null,
    ].filter(Boolean);

  // The tokens, latency and cost of a step; only kinds of figures that some step of the episode has.
  RK.usageTold = ({ usage }, has) =>
    [
      has.prompt || has.completion ? `${counted(usage.prompt)} → ${counted(usage.completion)} tokens` : null,
      ...parts(usage),
      has.policy_s ? `latency ${RK.seconds(usage.policy_s)}` : null,
      has.cost ? (usage.cost === null ? `cost ${RK.DASH}` : dollars(usage.cost)) : null,
    ].filter(Boolean);

  const totals = ({ usage, is_partly_priced }) => [
    `prompt tokens ${counted(usage.prompt)}`,
    `completion tokens ${counted(usage.completion)}`,
    ...parts(usage),
    `cost ${usage.cost === null ? RK.DASH : `${is_partly_priced ? "at least " : ""}${dollars(usage.cost)}`}`,
  ];

  const facts = (episode) => {
    const told = [
      episode.policy,
      `stop reason: ${episode.stop}`,
      `${episode.steps.length} step${episode.steps.length === 1 ? "" : "s"}`,
      episode.took_s === null ? null : `took ${RK.seconds(episode.took_s)}`,
      episode.attempt ? `attempt ${episode.attempt + 1}` : null,
      episode.environment_return === null ? null : `environment return ${RK.signed(episode.environment_return)}`,
      ...totals(episode),
    ];
    const shown = told.filter(Boolean).map((one) => el("li", { class: "stranger" }, one));
    return el("ul", { class: "facts" }, shown);
  };

  // The title of an error: the user's tool if it raised it.
  const failureTitle = ({ error, error_where: where, error_message: message }) => {
    const tool = /^tool '([^'\n]{1,100})': /.exec(message ?? "")?.[1];
    if (tool) return `error in tool ${tool}`;
    if (where === "EnvironmentFailure") return `${error} in the environment`;
    return where ? `${error} (${where})` : error;
  };

  const failure = (episode) => {
    const { error, error_message: message, traceback } = episode;
    return error
      ? el(
          "div",
          { class: "failure" },
          el("strong", { class: "stranger" }, failureTitle(episode)),
          RK.folded(message ?? ""),
          traceback ? RK.folded(traceback, undefined, "code") : null,
        )
      : null;
  };

  const metrics = (episode) => {
    const reasonOf = (one) =>
      one.reason ? el("span", { class: "faint stranger" }, ` ${RK.cut(one.reason, 300)}`) : null;
    const rows = episode.metrics.map((one) => [
      el("dt", { class: "stranger" }, one.name),
      el("dd", null, RK.figure(one.score), reasonOf(one)),
    ]);
    return rows.length ? el("dl", { class: "metrics" }, rows) : null;
  };

  // The calls, tokens and cost of a judge.
  const judgeUsage = ({ judge }) => {
    if (!judge) return null;
    const known = (name) => (judge[name] === undefined || judge[name] === "unknown" ? null : Number(judge[name]));
    const [calls, prompt, completion, cost] = ["calls", "prompt_tokens", "completion_tokens", "cost_usd"].map(known);
    const reasoning = known("reasoning_tokens");
    const tokens = prompt === null || completion === null ? null : prompt + completion;
    const told = [
      calls === null ? null : `${RK.count(calls)} call${calls === 1 ? "" : "s"}`,
      known("cached") ? `${RK.count(known("cached"))} cached` : null,
      tokens === null ? null : `${RK.count(tokens)} tokens${reasoning ? ` (${RK.count(reasoning)} reasoning)` : ""}`,
      cost === null ? null : dollars(cost),
    ].filter(Boolean);
    return told.length ? el("p", { class: "faint" }, `judge: ${told.join(", ")}`) : null;
  };

  const asides = ({ query, response, sample_data: data, ground_truth: truth }) => {
    const hasData = data && Object.keys(data).some((key) => key !== "id");
    const hasTruth = truth !== null && truth !== undefined;
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
    return [
      query ? aside("Judge prompt", query) : null,
      response ? aside("Judge response", response) : null,
      hasData ? aside("The sample", text(data)) : null,
      hasTruth ? aside("Ground truth", text(truth)) : null,
    ];
  };

  // The note on a group without differences.
  RK.tiedNote = (group) => {
    if (!group.is_tied) return null;
    const isDiscounted = group.episodes.some(({ steps }) => steps.some((step) => step.A));
    const rest = isDiscounted ? " Its advantages differ from 0 only because later rewards are discounted." : "";
    return el("p", { class: "tied" }, `All episodes of this group have the same score, so no step has credit.${rest}`);
  };

  // The source of the figures beside the steps, and how to compute missing ones.
  RK.creditTold = ({ credit }) => {
    const hint = [
      " ",
      el("code", null, "reward-kit credit RUN"),
      " computes the credit of each step and rewrites this page.",
    ];
    return el("p", { class: "faint credit-told" }, credit.told, credit.is_credited ? null : hint);
  };

  RK.episodeHead = (episode, group, heading) =>
    el(
      "section",
      { class: "episode-head" },
      crumbs(episode, group),
      heading,
      el("p", { class: "outcome" }, "score ", outcome(episode, "known")),
      facts(episode),
      failure(episode),
    );

  // One changed value of the final state: what it was, and what it is.
  const change = ({ at, old, new: now, to }) => {
    const path = (text) => el("code", { class: "stranger", dir: "auto" }, RK.plainText(text));
    const value = (mark, kind, text) =>
      text === undefined
        ? null
        : el(
            "div",
            { class: `change ${kind}` },
            el("span", { class: "mark", role: "img", "aria-label": kind }, mark),
            RK.folded(RK.plainText(text), undefined, "code"),
          );
    return el(
      "li",
      null,
      path(at),
      to === undefined ? null : [" moved to ", path(to)],
      value("−", "removed", old),
      value("+", "added", now),
    );
  };

  // The final state of the resource compared with its initial one; null if not recorded.
  RK.stateChanges = ({ state_changes: found }) => {
    if (!found || !Array.isArray(found.changes)) return null;
    const count = found.changes.length + (found.more || 0);
    if (!count) return el("p", { class: "state-changes" }, "The final state equals the initial state.");
    return el(
      "details",
      { class: "state-changes", open: count <= MANY_CHANGES },
      el("summary", null, `Changes of the state: ${RK.count(count)}`),
      el("ul", null, found.changes.map(change)),
      found.more ? el("p", { class: "faint" }, `and ${RK.count(found.more)} more`) : null,
    );
  };

  RK.episodeResult = (episode) =>
    el(
      "section",
      { class: "episode-result", "aria-label": "Score and metrics" },
      el("h3", null, "Score and metrics"),
      el("p", { class: "outcome" }, outcome(episode, "big")),
      episode.reason ? RK.folded(episode.reason, undefined, "reason") : null,
      metrics(episode),
      judgeUsage(episode),
      asides(episode),
    );
})();
