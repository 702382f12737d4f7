"use strict";
// Shared by all parts of the page: sanitized untrusted texts, elements, figures, colours, views and keys.
// Text is inserted as text only, never as markup.
const RK = (() => {
  // Control characters, bidirectional marks and lone surrogates; \n and \t stay.
  const UNSHOWN =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]/gu;
  const ACCENTS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f";
  const STACKED = new RegExp(`([${ACCENTS}]{4})[${ACCENTS}]+`, "g"); // more would overlap the lines above
  const PLAIN = /^[\n\t\x20-\x7e]*$/;
  const SVG = "http://www.w3.org/2000/svg";
  const DASH = "–";

  const writtenOut = (found) => {
    const code = found.codePointAt(0);
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  };

  // The first characters of a text, without half of a surrogate pair at the end.
  const cut = (text, limit) => {
    if (text.length <= limit) return text;
    const last = text.charCodeAt(limit - 1);
    return text.slice(0, last >= 0xd800 && last < 0xdc00 ? limit - 1 : limit);
  };

  const shown = (text, limit = Infinity, length = undefined) => {
    const whole = String(text);
    const begin = cut(whole, limit);
    const plain = PLAIN.test(begin) ? begin : begin.replace(UNSHOWN, writtenOut).replace(STACKED, "$1");
    const size = length ?? whole.length;
    return size <= limit && begin.length === whole.length ? plain : `${plain}… (${count(size)} characters)`;
  };

  const addTo = (element, children) => {
    for (const child of children) {
      if (child === null || child === undefined || child === false) continue;
      if (Array.isArray(child)) addTo(element, child);
      else element.append(child instanceof Node ? child : document.createTextNode(shown(child)));
    }
    return element;
  };

  const set = (element, key, value) => {
    if (value === null || value === undefined || value === false) return;
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (key === "css") for (const [name, one] of Object.entries(value)) element.style.setProperty(name, one);
    else if (key === "data") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : shown(value));
  };

  const made = (element, attributes, children) => {
    for (const [key, value] of Object.entries(attributes ?? {})) set(element, key, value);
    return addTo(element, children);
  };
  const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

  // Figures

  const seconds = (s) => {
    if (s === null || s === undefined) return DASH;
    if (s < 0.0005) return s === 0 ? "0 s" : "<1 ms";
    if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
    if (s < 99.95) return `${Number(s.toPrecision(3))} s`;
    if (s < 3600) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
    return `${Math.floor(Math.round(s / 60) / 60)} h ${Math.round(s / 60) % 60} min`;
  };
  const figure = (x) => {
    if (x === null || x === undefined) return DASH;
    return Math.abs(x) < 1000 ? x.toFixed(3) : String(Number(x.toPrecision(6)));
  };
  const signed = (x, digits = 3) => {
    if (x === null || x === undefined) return DASH;
    const size = Math.abs(x) < 1000 ? Math.abs(x).toFixed(digits) : String(Number(Math.abs(x).toPrecision(5)));
    if (!/[1-9]/.test(size)) return size;
    return (x < 0 ? "−" : "+") + size;
  };
  const dollars = (x) => {
    if (x >= 100) return `$${x.toFixed(2)}`;
    const isSmall = x > 0 && x < 0.001; // shown with two significant digits
    return `$${x.toFixed(isSmall ? Math.min(12, 1 - Math.floor(Math.log10(x))) : 4)}`;
  };
  const count = (n) => n.toLocaleString("en");

  // The colour class of a number: heat-m4 (-`scale`) … heat-0 … heat-p4 (`scale`); "" if unknown.
  const heat = (value, scale) => {
    if (value === null || value === undefined) return "heat-none";
    const level = scale > 0 ? Math.min(4, Math.ceil((Math.abs(value) / scale) * 4 - 1e-9)) : 0;
    if (level === 0) return "heat-0";
    return `heat-${value < 0 ? "m" : "p"}${level}`;
  };

  // Data

  const read = (id) => {
    const script = document.getElementById(id);
    return script ? JSON.parse(script.textContent) : {};
  };

  // Views: `#/episode/ID/3` is the view "episode"; everything else is the overview.

  const MARKED = "json:"; // before a part that a URL cannot contain
  const encoded = (part) => {
    const text = String(part);
    try {
      if (!text.startsWith(MARKED)) return encodeURIComponent(text);
    } catch {
      /* half of a surrogate pair */
    }
    return encodeURIComponent(MARKED + JSON.stringify(text));
  };
  const decoded = (part) => {
    try {
      const text = decodeURIComponent(part);
      return text.startsWith(MARKED) ? JSON.parse(text.slice(MARKED.length)) : text;
    } catch {
      return part; // a hand-written address
    }
  };
  const href = (name, ...parts) => `#/${[name, ...parts].map(encoded).join("/")}`;

  const openers = {};
  const state = { overview: null, route: 0, title: "" };
  let keys = {};

  const view = (name, open) => {
    openers[name] = open;
  };
  const go = (target) => {
    if (location.hash === target) return route();
    location.hash = target;
  };
  // Like `go`, without a history entry: for steps within a view.
  const replace = (target) => history.replaceState(null, "", target);
  const overview = () => {
    if (state.overview && state.overview.came) history.back();
    else go("#");
  };

  const show = (isView) => {
    const container = document.getElementById("view");
    document.body.classList.toggle("viewing", isView);
    for (const part of document.querySelectorAll("[data-overview]")) part.hidden = isView;
    container.hidden = !isView;
    return container;
  };

  const leaveOverview = () => {
    if (!document.body.classList.contains("viewing")) {
      const focus = document.activeElement;
      state.overview = { at: window.scrollY, focus, isInMatrix: RK.matrix?.space.contains(focus) };
    }
  };
  const backToOverview = () => {
    if (!document.body.classList.contains("viewing")) return;
    show(false).replaceChildren();
    document.title = state.title;
    const { at, focus, isInMatrix } = state.overview ?? { at: 0, focus: null };
    if (location.hash.length > 1) document.getElementById(decoded(location.hash.slice(1)))?.scrollIntoView();
    else window.scrollTo(0, at);
    if (isInMatrix) RK.matrix.focus(); // its cells were rendered again
    else if (focus?.isConnected) focus.focus({ preventScroll: true });
  };

  const route = async () => {
    const turn = ++state.route;
    const parts = location.hash.startsWith("#/") ? location.hash.slice(2).split("/").map(decoded) : [];
    const open = openers[parts[0]];
    if (!open) {
      keys = {};
      return backToOverview();
    }
    leaveOverview();
    const container = show(true);
    const isCurrent = () => turn === state.route;
    try {
      await open(container, parts.slice(1), isCurrent);
    } catch (error) {
      if (!isCurrent()) return;
      const heading = el("h2", { tabindex: -1 }, "This page cannot be shown");
      container.replaceChildren(
        el("p", null, el("a", { href: "#" }, "Back to overview")),
        heading,
        el("p", { class: "stranger" }, error.message),
      );
      heading.focus();
    }
  };

  const setKeys = (map) => {
    keys = map;
  };
  const onKey = (event) => {
    const isTyping = event.target.closest?.("input, select, textarea, [contenteditable]");
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || isTyping) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act(event);
  };

  const inits = [];
  const register = (name, init) => inits.push(init);
  const start = () => {
    state.title = document.title;
    for (const init of inits) init();
    document.addEventListener("keydown", onKey);
    window.addEventListener("hashchange", route);
    if (location.hash.startsWith("#/")) route();
  };
  document.addEventListener("DOMContentLoaded", start);

  return {
    DASH,
    count,
    cut,
    data: read("data"),
    dollars,
    el,
    encoded,
    figure,
    go,
    heat,
    href,
    overview,
    read,
    register,
    replace,
    route,
    seconds,
    setKeys,
    shown,
    signed,
    svg,
    view,
  };
})();
