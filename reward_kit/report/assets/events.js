// What the server tells while a page is looked at. A page that is hidden hangs up: a browser keeps six connections to a
// server at most, and what was missed is told when it is looked at again.
(() => {
  const AGAIN_S = 3;

  // `handlers` by the name of the event; `told` is called with a sentence on the connection, "" where all is well.
  const listen = (handlers, told) => {
    const state = { source: null, mark: RK.mark, again: null, isOver: false };

    const hangUp = () => {
      clearTimeout(state.again);
      state.source?.close();
      state.source = null;
    };
    const lost = () => {
      hangUp();
      told("No connection: what you see is as it was told last. Is `reward-kit view` still running?");
      state.again = setTimeout(open, AGAIN_S * 1000);
    };
    const trouble = (data) => {
      state.isOver = true;
      hangUp();
      told(data.message);
    };
    const on = (name, handle) => state.source.addEventListener(name, (event) => {
      state.mark = event.lastEventId || state.mark;
      handle(JSON.parse(event.data));
    });
    const open = () => {
      if (state.source || state.isOver || document.hidden) return;
      state.source = new EventSource(`events?since=${encodeURIComponent(state.mark)}`);
      state.source.addEventListener("open", () => told(""));
      state.source.addEventListener("error", lost);
      on("trouble", trouble);
      for (const [name, handle] of Object.entries(handlers)) on(name, handle);
    };
    document.addEventListener("visibilitychange", () => (document.hidden ? hangUp() : open()));
    window.addEventListener("pagehide", hangUp);
    window.addEventListener("pageshow", open);
    open();
  };

  // A line above the heading, read out to those who do not see it; `links` stand before it.
  const line = (...links) => {
    const status = RK.el("span", { role: "status" });
    document.querySelector("header").before(RK.el("nav", { class: "live", "aria-label": "Viewer" }, links, status));
    return (text) => { if (status.textContent !== text) status.textContent = text; };
  };

  // What somebody is in the middle of stays: the focus, what is folded out, and how far a table is scrolled sideways.
  const REACHED = "a[href], button, summary, input, select, [tabindex]";
  const keeping = (root, change) => {
    const focused = root.contains(document.activeElement) ? document.activeElement : null;
    const place = focused ? [...root.querySelectorAll(REACHED)].indexOf(focused) : -1;
    const href = focused?.getAttribute("href");
    const said = new Set([...root.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
    const lefts = [...root.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    change();
    for (const summary of root.querySelectorAll("details > summary")) {
      if (said.has(summary.textContent)) summary.parentElement.open = true;
    }
    root.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = lefts[at] ?? 0; });
    if (!focused || focused.isConnected) return;
    const reached = [...root.querySelectorAll(REACHED)];
    const again = href ? reached.find((one) => one.getAttribute("href") === href) : reached[place];
    again?.focus({ preventScroll: true });
  };

  Object.assign(RK, { keeping, line, listen });
})();
