// Full-text search of a page that contains its episodes. The texts are read when the page is idle.
(() => {
  if (RK.read("index").mode !== "inline") return;
  const NOT_TEXT = new Set(["role", "type", "id", "tool_call_id", "state_key", "state_and_results", "info", "outputs"]);
  let texts = null; // episode -> its messages and tool calls in lower case

  const stringsOf = (value, found = []) => {
    if (typeof value === "string") found.push(value);
    else if (Array.isArray(value)) for (const one of value) stringsOf(one, found);
    else if (value && (value.__type__ !== undefined || value.__cut__ !== undefined)) found.push(RK.plainText(value));
    else if (value) for (const [key, one] of Object.entries(value)) if (!NOT_TEXT.has(key)) stringsOf(one, found);
    return found;
  };

  const read = () => {
    if (texts) return texts;
    texts = new Map();
    for (const script of document.querySelectorAll("script[data-chunk]")) {
      for (const line of script.textContent.split("\n")) {
        if (line[0] !== "E") continue;
        try {
          const record = JSON.parse(line.slice(1));
          const spoken = record.messages?.length ? record.messages : record.steps;
          texts.set(record.rollout_id, stringsOf(spoken ?? []).join("\n").toLowerCase());
        } catch {
          continue; // a damaged line is not found
        }
      }
    }
    return texts;
  };

  RK.searchText = async (query) => {
    const wanted = query.toLowerCase();
    return new Set([...read()].filter(([, text]) => text.includes(wanted)).map(([id]) => id));
  };
  RK.register("search", () => (window.requestIdleCallback ?? setTimeout)(read));
})();
