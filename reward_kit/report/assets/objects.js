// Converts stored lines to objects of the page: episodes with their messages and steps, groups with the states shared by
// several steps. RK.groupOf makes a group from the lines of its episodes.
(() => {
  const LONGEST = 20000; // displayed characters of a message
  const LONGEST_ACTION = 2000;
  const USAGE = "judge_usage"; // the metric with a judge's usage
  const DIGEST = /^[0-9a-f]{32,}$/;
  const settings = RK.read("index").credit ?? null; // settings of the run's credit

  // Stored values

  const decoded = (base64) => new TextDecoder().decode(Uint8Array.from(atob(base64), (byte) => byte.charCodeAt(0)));

  // A stored value as {text, length}: long texts may be stored truncated.
  const said = (value, limit = LONGEST) => {
    if (value === null || value === undefined) return { text: "", length: 0 };
    if (typeof value === "string") return { text: RK.cut(value, limit), length: value.length };
    if (typeof value === "object" && "__cut__" in value)
      return { text: RK.cut(value.__cut__, limit), length: value.length };
    if (typeof value === "object" && value.__type__ === "text") return said(decoded(value.value), limit);
    return said(JSON.stringify(value), limit);
  };
  const plainText = (value) => said(value).text;

  // The content of a message: a text, or parts; only text parts are shown.
  const content = (value) => {
    if (!Array.isArray(value)) return said(value);
    const told = value.map((part) =>
      part?.text === undefined ? { text: `[${part?.type ?? "part"}]`, length: 0 } : said(part.text),
    );
    const text = told.map((one) => one.text).join("\n");
    return {
      text: RK.cut(text, LONGEST),
      length: Math.max(
        text.length,
        told.reduce((sum, one) => sum + one.length, 0),
      ),
    };
  };

  const argumentsText = (value) => {
    if (value === null || typeof value !== "object" || "__cut__" in value) return plainText(value);
    return Object.entries(value)
      .map(([name, one]) => `${name}=${typeof one === "object" ? plainText(one) : JSON.stringify(one)}`)
      .join(", ");
  };

  // An action as text: the message, or the calls.
  const actionText = (action) => {
    if (action === null || typeof action !== "object") return plainText(action);
    const calls = action.calls ?? ("name" in action ? [action] : []);
    const text = calls.length
      ? calls.map((call) => `${plainText(call.name)}(${argumentsText(call.arguments)})`).join("; ")
      : plainText(action.content ?? action.type ?? action);
    return RK.shown(text, LONGEST_ACTION);
  };

  const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

  // Messages

  const messageOf = (message) => {
    const { text, length } = content(message.content);
    const calls = message.tool_calls ?? (message.function_call ? [{ function: message.function_call }] : []);
    return {
      role: plainText(message.role) || "?",
      text,
      length,
      is_cut: length > text.length,
      reasoning: message.reasoning_content ? said(message.reasoning_content) : null,
      name: message.name ? plainText(message.name) : null,
      calls: calls.map((call) => ({
        name: plainText(call.function?.name),
        arguments: plainText(call.function?.arguments),
        id: call.id ?? null,
      })),
      call_id: message.tool_call_id ?? null,
    };
  };

  // The conversation, or without one, messages made from observations and actions.
  const messagesOf = (record) => {
    const steps = record.steps ?? [];
    const turns = new Map(steps.map((step, t) => [step?.assistant_turn, t]));
    turns.delete(undefined);
    if ((record.messages ?? []).length) {
      let next = 0;
      return record.messages.map((message, place) => {
        if (turns.has(place)) next = turns.get(place) + 1;
        const isAction = turns.has(place);
        return { ...messageOf(message ?? {}), step: isAction ? next - 1 : next < turns.size ? next : null };
      });
    }
    const plain = (role, value, step) => ({ ...messageOf({ role, content: plainText(value) }), step });
    const seen = (step, t) => (step?.observation === undefined ? [] : [plain("observation", step.observation, t)]);
    const made = steps.flatMap((step, t) => [...seen(step, t), plain("assistant", actionText(step?.action), t)]);
    return [...made, ...seen(record.final, null)];
  };

  // Steps

  // The rewards of steps: as recorded, and as counted. If an environment gave only 0, the score counts.
  const rewardsOf = (record, score, count) => {
    const none = new Array(count).fill(null);
    const outputs = score?.result?.step_outputs ?? [];
    if (outputs.length) {
      const rewards = [...none];
      for (const output of outputs)
        if (output.step_index in rewards) rewards[output.step_index] = number(output.base_reward);
      return { rewards, counted: rewards, of: "the reward function’s" };
    }
    if (number(record.environment_return) === null) return { rewards: none, counted: none, of: null };
    const outcome = (t) => record.steps[t + 1]?.info ?? record.final?.info ?? {};
    const given = record.steps.map((step, t) => (outcome(t).environment_reward === null ? 0 : number(step.reward)));
    return given.some(Boolean)
      ? { rewards: given, counted: given, of: "the environment’s" }
      : { rewards: given, counted: none, of: null };
  };

  // G of each step; if a step has no reward the score is added at the last one, as in credit.
  const returnsOf = (rewards, score, gamma, usual) => {
    const hasAll = rewards.every((reward) => reward !== null);
    if (!hasAll && score === null) return rewards.map(() => null);
    let after = 0;
    return rewards
      .map((reward, t) => [reward ?? usual, t])
      .reverse()
      .map(([reward, t]) => {
        after = reward + (t === rewards.length - 1 && !hasAll ? score : 0) + gamma * after;
        return after;
      })
      .reverse();
  };

  // The recorded tokens, seconds and cost of an action; null if missing.
  const usageOf = (usage, policy_s) => ({
    prompt: number(usage?.prompt_tokens),
    completion: number(usage?.completion_tokens),
    cached: number(usage?.cached_tokens),
    cache_write: number(usage?.cache_write_tokens),
    reasoning: number(usage?.reasoning_tokens),
    policy_s: number(policy_s),
    cost: number(usage?.cost),
  });

  const stepsOf = (record, score, credit, messages) => {
    const steps = record.steps ?? [];
    const outputs = new Map((score?.result?.step_outputs ?? []).map((output) => [Number(output.step_index), output]));
    const byStep = new Map(credit.map((line) => [line.step, line]));
    const { rewards, counted, of } = rewardsOf(record, score, steps.length);
    const gamma = number(settings?.gamma) ?? 1;
    const usual = number(settings?.default_step_reward) ?? 0;
    const final = number(score?.score);
    const returns = returnsOf(counted, final, gamma, usual);
    const credited = steps.map((_, t) => (byStep.has(t) ? number(byStep.get(t).base_reward) : counted[t]));
    const undiscounted = final === null ? [] : returnsOf(credited, final, 1, usual);
    const places = new Map(
      messages.map((message, place) => [message.role === "assistant" ? message.step : undefined, place]),
    );
    const made = steps.map((step, t) => {
      const line = byStep.get(t);
      const outcome = (t + 1 < steps.length ? steps[t + 1] : record.final)?.info ?? {};
      const key = plainText(line?.state_key ?? step?.state_and_results ?? step?.state_key) || null;
      return {
        index: t,
        action: actionText(step?.action),
        message: places.get(t) ?? null,
        reward: line ? number(line.base_reward) : rewards[t],
        reward_reason: outputs.get(t)?.reason ? plainText(outputs.get(t).reason) : null,
        ret: line ? number(line.return_to_go) : returns[t],
        undiscounted: undiscounted[t] ?? null,
        peer: null, // set for the whole group
        A_E: number(line?.A_E),
        A_S: number(line?.A_S),
        A: number(line?.A),
        value: number(line?.value),
        key,
        key_text: key && !DIGEST.test(key) ? key : null,
        anchor: line?.anchor ?? null,
        peers: [],
        is_valid: outcome.is_action_valid ?? null,
        usage: usageOf(outcome.usage, record.timing?.steps_policy_s?.[t]),
        tool_errors: (outcome.tools ?? []).filter((tool) => tool?.error).map((tool) => plainText(tool.error)),
        version: number(step?.outputs?.policy_version),
      };
    });
    return {
      steps: made,
      told: toldOf(
        byStep.size > 0,
        of,
        counted.every((reward) => reward !== null),
      ),
    };
  };

  // Mark the results of calls that failed; they follow the message of their step in order.
  const markErrors = (record, messages) => {
    (record.steps ?? []).forEach((step, t) => {
      const tools = (record.steps[t + 1]?.info ?? record.final?.info)?.tools ?? [];
      tools.forEach((tool, place) => {
        const message = messages[(step?.assistant_turn ?? NaN) + 1 + place];
        if (tool?.error && message?.role === "tool") message.is_error = true;
      });
    });
  };

  // The source of the steps' figures, in words.
  const toldOf = (isCredited, of, hasAll) => {
    const gamma = number(settings?.gamma) ?? 1;
    if (isCredited && settings) {
      const weights = ["omega", "step_weight"]
        .filter((key) => number(settings[key]) !== null)
        .map((key) => `${key} ${settings[key]}`);
      const hash = settings.state_hash ? [`state hash ${settings.state_hash}`] : [];
      const how = [settings.estimator, ...weights, ...hash].join(", ");
      return {
        is_credited: true,
        gamma,
        told: `Credit by ${how}. G is the sum of rewards from a step on, discounted by γ = ${gamma} per step.`,
      };
    }
    const some = hasAll ? "" : "; missing ones count 0, and the score is added at the last step";
    const rewards = of
      ? `Rewards are ${of}${some}`
      : "No step has a reward other than 0; the score counts as the reward of the last step";
    const discount = settings
      ? `discounted by the γ of the credit, ${gamma}`
      : "undiscounted (γ = 1), since the run has no credit";
    return { is_credited: false, gamma, told: `${rewards}; G is the sum of rewards from a step on, ${discount}.` };
  };

  // Episodes and groups

  const metricsOf = (result) =>
    Object.entries(result?.metrics ?? {})
      .filter(([name]) => name !== USAGE)
      .map(([name, metric]) => ({ name, score: number(metric?.score), reason: plainText(metric?.reason) }));

  // The usage that judges report as the reason of a metric: `calls=1 cost_usd=0.01`.
  const judgeOf = (result) => {
    const told = result?.metrics?.[USAGE];
    const figures = [...plainText(told?.reason).matchAll(/(\w+)=(unknown|\d+(?:\.\d+)?)(?=\s|$)/g)];
    return figures.length ? Object.fromEntries(figures.map(([, name, value]) => [name, value])) : null;
  };

  const episodeOf = ({ record, score, credit, curves }, id, group_id, place) => {
    const known = record ?? {};
    const messages = messagesOf(known);
    const { steps, told } = stepsOf(known, score, credit, messages);
    markErrors(known, messages);
    const { result, failure: broken } = score ?? {};
    const failure = record
      ? (known.failure ?? broken)
      : { class: "damaged", message: "The stored line of this episode cannot be read." };
    return {
      id,
      group: group_id,
      index: place,
      sample: plainText(known.sample_id),
      policy: plainText(known.policy),
      attempt: known.attempt ?? 0,
      rollout_index: known.rollout_index ?? place,
      score: number(score?.score),
      is_imputed: Boolean(result?.is_imputed),
      stop: plainText(known.stop_reason),
      error: failure ? plainText(failure.class) : null,
      error_message: failure ? plainText(failure.message) : null,
      error_where: failure ? plainText(failure.where) : null,
      traceback: failure?.traceback ? plainText(failure.traceback) : null,
      reason: plainText(result?.reason),
      took_s: number(known.timing?.duration_s),
      policy_s: number(known.timing?.policy_s),
      environment_s: number(known.timing?.environment_s),
      environment_return: number(known.environment_return),
      usage: usageOf(known.usage),
      is_partly_priced: steps.some(({ usage }) => usage.cost === null && usage.completion !== null),
      metrics: metricsOf(result),
      judge: judgeOf(result),
      query: result?.query ? plainText(result.query) : null,
      response: result?.response ? plainText(result.response) : null,
      sample_data: known.sample ?? null,
      ground_truth: known.ground_truth ?? null,
      state_changes: known.custom_data?.state_changes ?? null,
      messages,
      steps,
      tokens: known.tokens ?? null,
      credit: told,
      curves: curves ?? [],
    };
  };

  const mean = (values) => {
    const numbers = values.filter((value) => value !== null);
    return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
  };

  // The actions taken in one state, one entry per action, in order of occurrence.
  const actionsOf = (episodes, members) => {
    const actions = new Map();
    for (const [e, t] of members) {
      const { action } = episodes[e].steps[t];
      if (!actions.has(action)) actions.set(action, []);
      actions.get(action).push([e, t]);
    }
    const of = (own, key) => mean(own.map(([e, t]) => episodes[e].steps[t][key]));
    return [...actions].map(([text, own]) => ({
      text,
      members: own,
      mean_return: of(own, "ret"),
      mean_A: of(own, "A"),
      mean_peer: of(own, "peer"),
    }));
  };

  // `peer` of each step: its undiscounted return minus the mean of all steps in the same state; null if no other episode
  // was in it. Whole episodes are compared if they share no states, or if the estimator compares them without states.
  // Discounting would favor late steps even among equal episodes.
  const comparePeers = (episodes, states) => {
    const known = (steps) => steps.filter((step) => step.undiscounted !== null);
    const all = known(episodes.flatMap(({ steps }) => steps));
    const least = 1e-9 * all.reduce((most, step) => Math.max(most, Math.abs(step.undiscounted)), 1);
    const compare = (step, own, others) => {
      const difference = own - mean(others.map((other) => other.undiscounted));
      step.peer = Math.abs(difference) < least ? 0 : difference;
    };
    const isGrouped = all.some((step) => step.A !== null) && all.every((step) => step.anchor === null);
    const shared = isGrouped ? [] : states.filter((members) => new Set(members.map(([e]) => e)).size > 1);
    for (const members of shared) {
      const steps = known(members.map(([e, t]) => episodes[e].steps[t]));
      for (const step of steps) compare(step, step.undiscounted, steps);
    }
    if (shared.length) return;
    const firsts = known(episodes.flatMap(({ steps }) => steps.slice(0, 1)));
    for (const { steps } of episodes) for (const step of known(steps)) compare(step, steps[0].undiscounted, firsts);
  };

  // Computed on demand: storing the peers of all steps would be quadratic.
  const withPeers = (step, one, at, members) => {
    const get = () => members.filter(([other, t]) => other !== one || t !== at);
    Object.defineProperty(step, "peers", { get, enumerable: true });
  };

  // The steps [episode, step] of each state that several steps share; recorded keys if the estimator uses no states.
  const statesOf = (episodes) => {
    const states = new Map();
    episodes.forEach((one, e) =>
      one.steps.forEach((step, t) => {
        if (step.key === null && step.anchor === null) return;
        const name = step.anchor === null ? `key ${step.key}` : `anchor ${step.anchor}`;
        if (!states.has(name)) states.set(name, []);
        states.get(name).push([e, t]);
      }),
    );
    return [...states.values()].filter((members) => members.length > 1);
  };

  const anchorsOf = (episodes, states) =>
    states.map((members) => {
      const [[e, t]] = members;
      for (const [one, step] of members) withPeers(episodes[one].steps[step], one, step, members);
      const { key, anchor, key_text } = episodes[e].steps[t];
      const mean_return = mean(members.map(([a, b]) => episodes[a].steps[b].ret));
      return { key, anchor, text: key_text, members, mean_return, actions: actionsOf(episodes, members) };
    });

  const groupOf = (id, size, first, ids, stored) => {
    const episodes = stored.map((one, place) => episodeOf(one, ids[place], id, place));
    const scores = episodes.map((one) => one.score);
    const known = scores.filter((score) => score !== null);
    const states = statesOf(episodes);
    comparePeers(episodes, states);
    const differs = episodes.some(({ steps }) => steps.some((step) => step.peer));
    return {
      id,
      size,
      first,
      sample: episodes[0].sample,
      policy: [...new Set(episodes.map((one) => one.policy))].join(", "),
      episodes,
      baseline: mean(scores),
      scored: known.length,
      is_tied: known.length > 1 && new Set(known).size === 1 && !differs,
      anchors: anchorsOf(episodes, states),
    };
  };

  Object.assign(RK, { credit: settings, groupOf, plainText });
})();
