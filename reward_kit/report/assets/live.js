// The page of a running run: new episode rows as they arrive, and occasionally refreshed figures.
(() => {
  const LEAST_MS = 1000;
  const SHARE = 0.05; // largest share of time for refreshing the figures

  const bodyOf = (name) => document.querySelector(`[data-table="${name}"] tbody`);

  const swap = (page) => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = page.querySelector(`[data-live="${part.dataset.live}"]`);
      if (fresh && fresh.innerHTML !== part.innerHTML) RK.keeping(part, () => part.replaceChildren(...fresh.childNodes));
    }
    const isViewing = document.body.classList.contains("viewing");
    for (const part of document.querySelectorAll("[data-overview]")) part.hidden = isViewing;
    RK.enliven?.(document); // the page of a training run has no tables
    RK.swapped?.(page);
  };

  RK.register("live", () => {
    const status = RK.line(RK.el("a", { href: "../" }, "All runs"));
    const state = { isMaking: false, isWanted: false, came: 0 };

    const figures = async () => {
      state.isWanted = true;
      if (state.isMaking) return;
      state.isMaking = true;
      while (state.isWanted) {
        state.isWanted = false;
        const began = performance.now();
        try {
          const answer = await fetch("figures");
          // Parsed by the browser like a page; neither the parser nor the policy runs its scripts.
          if (answer.ok) swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
        } catch {
          break; // the connection is lost; the stream reports it
        }
        const took = performance.now() - began;
        await new Promise((done) => setTimeout(done, Math.max(LEAST_MS, took / SHARE)));
      }
      state.isMaking = false;
    };

    const rows = (told) => {
      for (const [name, changed] of Object.entries(told)) {
        RK.keeping(bodyOf(name), () => RK.tables[name].upsert(changed));
      }
      RK.forget?.();
      state.came += told.episodes.length;
      status(`Live: ${RK.count(state.came)} ${state.came === 1 ? "episode" : "episodes"} new, scored or labeled.`);
    };

    const said = (text) => { if (text) status(text); };
    RK.listen({ rows, figures, reload: () => location.reload() }, said);
  });
})();
