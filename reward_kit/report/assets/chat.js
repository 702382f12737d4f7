// A formatted message: long texts folded, calls with their arguments and results, JSON indented.
(() => {
  const { el } = RK;
  const OPEN = { letters: 900, lines: 18 }; // of an unfolded text
  const ONE_LINE = 88;
  const JSON_PARTS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
  const DRAWN = /\S {2,}\S|[#|=_+*.-]{4,}|\n {2,}\S/; // boards, tables and code are shown in monospace

  const parsed = (text) => {
    if (!/^\s*[{[]/.test(text)) return undefined;
    try {
      return JSON.parse(text);
    } catch {
      return undefined;
    }
  };

  // Indented JSON. Tokens stay as written, so that numbers keep their form; letters are not escaped.
  const setOut = (text) => {
    const tokens = text.match(JSON_PARTS) ?? [];
    let out = "";
    let depth = 0;
    const begin = () => `\n${"  ".repeat(depth)}`;
    tokens.forEach((token, place) => {
      const next = tokens[place + 1];
      if (token === "{" || token === "[") {
        depth += 1;
        out += next === "}" || next === "]" ? token : token + begin();
      } else if (token === "}" || token === "]") {
        depth -= 1;
        const before = tokens[place - 1];
        out += before === "{" || before === "[" ? token : begin() + token;
      } else if (token === ",") out += `,${begin()}`;
      else if (token === ":") out += ": ";
      else out += token.includes("\\u") ? JSON.stringify(JSON.parse(token)) : token;
    });
    return out;
  };

  const linesOf = (text) => {
    let lines = 1;
    for (let at = text.indexOf("\n"); at >= 0 && lines <= OPEN.lines; at = text.indexOf("\n", at + 1)) lines += 1;
    return lines;
  };

  const preview = (text) => RK.cut(text.trimStart().split("\n", 3).join(" ⏎ "), 160);

  // A text in full if short, else folded behind its beginning.
  const folded = (text, length = text.length, kind = "") => {
    const isDrawn = kind.includes("code") || DRAWN.test(text);
    const block = () => el("div", { class: `said stranger${isDrawn ? " drawn" : ""} ${kind}`, dir: "auto" }, text);
    const rest =
      length > text.length
        ? el(
            "p",
            { class: "faint" },
            `… cut after ${RK.count(text.length)} of ${RK.count(length)} characters; the full text is in episodes.jsonl`,
          )
        : null;
    if (text.length <= OPEN.letters && linesOf(text) <= OPEN.lines) return [block(), rest];
    const fold = el(
      "details",
      { class: "fold" },
      el(
        "summary",
        null,
        el("span", { class: "stranger", dir: "auto" }, preview(text)),
        el("span", { class: "faint" }, ` … ${RK.count(length)} characters`),
      ),
    );
    fold.addEventListener("toggle", () => {
      // created on opening
      if (fold.open && fold.children.length === 1) fold.append(...[block(), rest].filter(Boolean));
    });
    return [fold];
  };

  const valueOf = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

  // The arguments of a call: on one line if they fit, else one by one.
  const argumentsOf = (text) => {
    const value = parsed(text);
    if (value === undefined || Array.isArray(value))
      return [null, text.trim() ? folded(value ? setOut(text) : text, undefined, "code") : null];
    const entries = Object.entries(value);
    const line = entries.map(([name, one]) => `${name}: ${JSON.stringify(one)}`).join(", ");
    if (line.length <= ONE_LINE) return [line, null];
    const rows = entries.map(([name, one]) => [
      el("dt", { class: "stranger" }, name),
      el("dd", null, folded(valueOf(one), undefined, "code")),
    ]);
    return [null, el("dl", { class: "arguments" }, rows)];
  };

  const callOf = (call, results) => {
    const [line, block] = argumentsOf(call.arguments);
    const head = el(
      "div",
      { class: "call-head" },
      el("code", { class: "stranger" }, call.name || "(no name)"),
      line ? el("code", { class: "stranger call-line" }, `(${line})`) : null,
    );
    return el("div", { class: "call" }, head, block, results.map(resultOf));
  };

  const resultOf = (message) => {
    const value = parsed(message.text);
    const text =
      value !== undefined && !message.is_cut && message.text.length > ONE_LINE ? setOut(message.text) : message.text;
    const isEmpty = !message.text;
    return el(
      "div",
      { class: message.is_error ? "result failed" : "result" },
      el("span", { class: "role" }, "result"),
      message.is_error ? el("span", { class: "tag bad" }, "tool error") : null,
      isEmpty
        ? el("span", { class: "faint" }, "empty")
        : folded(text, message.is_cut ? message.length : text.length, "code"),
    );
  };

  // A message with the `results` of its calls.
  const messageOf = (message, results = []) => {
    const own = (call) => results.filter((result) => result.call_id !== null && result.call_id === call.id);
    const taken = new Set(message.calls.flatMap(own));
    const others = results.filter((result) => !taken.has(result));
    const name = message.name && message.role !== "tool" ? `${message.role} ${message.name}` : message.role;
    return el(
      "div",
      { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : ""}` },
      message.role === "tool"
        ? null
        : el("div", { class: message.role === "assistant" ? "role hidden-role" : "role" }, name),
      message.reasoning?.text
        ? el(
            "details",
            { class: "fold reasoning" },
            el("summary", null, "reasoning"),
            folded(message.reasoning.text, message.reasoning.length),
          )
        : null,
      message.role === "tool" ? resultOf(message) : message.text ? folded(message.text, message.length) : null,
      message.calls.map((call) => callOf(call, own(call))),
      others.map((result) => messageOf(result)),
    );
  };

  // Messages in order; results that directly follow their calls are shown below them.
  RK.chat = (messages) => {
    const blocks = [];
    for (let place = 0; place < messages.length; place += 1) {
      const message = messages[place];
      const results = [];
      if (message.calls.length) {
        while (messages[place + 1]?.role === "tool") results.push(messages[(place += 1)]);
      }
      blocks.push(messageOf(message, results));
    }
    return blocks;
  };
  Object.assign(RK, { folded, setOut });
})();
