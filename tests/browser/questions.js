// What tests ask of a page: an object of functions, evaluated in it.
(() => {
  const REACHABLE = "a[href], button, input, select, summary, [tabindex='0']";
  const told = (one) => `${one.tagName} ${one.getAttribute("class")} ${one.textContent.trim().slice(0, 40)}`;

  const usable = () => {
    const canBeUsed = (one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0;
    return [...document.querySelectorAll(REACHABLE)].filter(canBeUsed);
  };

  // Notes what the focus comes to from now on, from the top of the page, and says how much can be used.
  const watchFocus = () => {
    document.body.tabIndex = -1;
    document.body.focus();
    document.body.removeAttribute("tabindex");
    window.reached = new Set();
    document.addEventListener("focusin", (event) => window.reached.add(event.target));
    return usable().length;
  };
  const unreached = () => usable().filter((one) => !window.reached.has(one)).map(told);

  // What sticks out of the page sideways, and is not inside something that scrolls or is cut by itself. What is far
  // to the left is for those who listen.
  const stickingOut = () => {
    const wide = document.documentElement.clientWidth;
    const isInside = (one) => {
      for (let at = one.parentElement; at && at !== document.body; at = at.parentElement) {
        if (getComputedStyle(at).overflowX !== "visible") return true;
      }
      return false;
    };
    const found = [];
    for (const one of document.body.querySelectorAll("*")) {
      if (!one.checkVisibility() || one.closest(".skip")) continue;
      const box = one.getBoundingClientRect();
      const isOut = box.width && (box.right > wide + 1 || (box.left < -1 && box.right > -1000));
      if (isOut && !isInside(one)) found.push(`${told(one)}: ${Math.round(box.left)} to ${Math.round(box.right)} of ${wide}`);
    }
    const whole = document.documentElement.scrollWidth;
    return whole > wide ? [...found, `the page is ${whole} wide, its window ${wide}`] : found;
  };

  // The contrast of each text with what is painted below it (WCAG 2.2, 1.4.3); large text may have less.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (above, below) => [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
  const luminance = ([r, g, b]) => {
    const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const below = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.push(colour(getComputedStyle(at).backgroundColor));
    const page = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return layers.reverse().reduce((painted, layer) => over(layer, painted), page);
  };
  const NOT_READ = "script, style, noscript, title, :disabled, .skip";
  const pale = () => {
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.textContent.trim();
      const one = walker.currentNode.parentElement;
      if (!text || one.closest(NOT_READ) || !one.checkVisibility({ visibilityProperty: true })) continue;
      const style = getComputedStyle(one);
      const svg = one.closest("svg");
      const ground = below(svg ?? one);
      const ink = over(colour(svg ? style.fill : style.color), ground);
      const [low, high] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
      const ratio = (high + 0.05) / (low + 0.05);
      const size = parseFloat(style.fontSize);
      const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      const name = `${one.tagName}.${one.getAttribute("class")} ${ink.map(Math.round)} on ${ground.map(Math.round)}`;
      if (ratio < (isLarge ? 3 : 4.5)) found.set(name, `${name}: ${ratio.toFixed(2)}, "${text.slice(0, 30)}"`);
    }
    return [...found.values()];
  };

  return { pale, stickingOut, unreached, watchFocus };
})()
