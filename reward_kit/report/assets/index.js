// The table of runs, updated by the server.
(() => {
  RK.register("runs", () => {
    const table = RK.tables.runs;
    const body = document.querySelector("[data-table=runs] tbody");
    const status = RK.line();
    const newest = table.place("began");
    table.by(newest);
    table.by(newest);

    const rows = ({ changed, all }) => {
      const isStale = new Set(changed.map((row) => row[0][0]));
      const isThere = all && new Set(all);
      RK.keeping(body, () => {
        table.remove((row) => isStale.has(row[0][0]) || (isThere && !isThere.has(row[0][0])));
        table.upsert(changed);
      });
    };
    RK.listen({ rows, reload: () => location.reload() }, status);
  });
})();
