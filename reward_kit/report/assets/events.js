// Events from the server while a page is visible. A hidden page disconnects, since browsers allow only six connections
// per server; it receives missed events when it is visible again.
(() => {
  const AGAIN_S = 3;

  // `handlers` by event name; `told` is called with a message about the connection, "" if it works.
  const listen = (handlers, told) => {
    const state = { source: null, mark: RK.mark, again: null, isOver: false };

    const hangUp = () => {
      clearTimeout(state.again);
      state.source?.close();
      state.source = null;
    };
    const lost = () => {
      hangUp();
      told("No connection; this page is out of date. Is `reward-kit view` still running?");
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

  // A status line above the heading, announced by screen readers, after `links`.
  const line = (...links) => {
    const status = RK.el("span", { role: "status" });
    document.querySelector("header").before(RK.el("nav", { class: "live", "aria-label": "Viewer" }, links, status));
    return (text) => { if (status.textContent !== text) status.textContent = text; };
  };

  // Keep the reader's state: focus, unfolded details, and horizontal scrolling of tables.
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
