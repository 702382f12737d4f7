// The parts of a run's page that need the server: full-text search, and labels.
(() => {
  const LONGEST = 500;

  const json = async (...request) => {
    const answer = await fetch(...request);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };
  const search = async (query) => new Set((await json(`search?q=${encodeURIComponent(RK.cut(query, LONGEST))}`)).ids);
  const readLabels = (id) => json(`labels?rollout_id=${RK.encoded(id)}`);
  const saveLabel = (label) =>
    json("labels", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(label) });

  Object.assign(RK, { readLabels, saveLabel, searchText: search });
  RK.register("viewer", () => search("").catch(() => {})); // reads the texts in the background
})();
