// One episode step by step: the conversation first, then its score, then how credit compares it with its group.
(() => {
  const { el, numbersOf, peersOf, scalesOf } = RK;
  const MANY = 200; // steps on the page at a time
  const KEY_SHOWN = 12;

  class EpisodePage {
    constructor(container, group, episode) {
      this.container = container;
      this.group = group;
      this.episode = episode;
      this.scales = scalesOf(group);
      this.isCredited = Boolean(RK.credit) || group.episodes.some(({ steps }) => steps.some((step) => step.A !== null));
      const has = (key) => episode.steps.some(({ usage }) => usage[key] !== null);
      this.has = { prompt: has("prompt"), completion: has("completion"), policy_s: has("policy_s"), cost: has("cost") };
      this.hasRewards = episode.steps.some((step) => step.reward);
      this.anchors = new Map(
        group.anchors.flatMap((anchor) =>
          anchor.members.filter(([e]) => e === episode.index).map(([, t]) => [t, anchor]),
        ),
      );
      this.current = null;
      this.cards = new Map();
      this.tree = el("div");
      this.list = el("ol", { class: "steps", start: 0 });
      container.replaceChildren(
        ...[
          this.bar(),
          this.head(),
          this.strip(),
          this.success(),
          this.before(),
          this.list,
          this.after(),
          RK.episodeResult(episode),
          RK.stateChanges(episode),
          RK.labelBox(episode),
          this.creditPart(),
        ].filter(Boolean),
      );
      this.shows(0);
    }

    // Next and previous episodes: in the current order and filter of the episode table

    neighbours() {
      const table = RK.tables?.episodes;
      const idOf = (row) => (Array.isArray(row[0]) ? row[0][1] : row[0]);
      let ids = (table?.chosen() ?? []).map(idOf);
      let at = ids.indexOf(this.episode.id);
      if (at < 0) {
        ids = (table?.rows ?? []).map(idOf);
        at = ids.indexOf(this.episode.id);
      }
      const within = this.group.episodes;
      const next = within[(this.episode.index + 1) % within.length];
      return {
        before: at > 0 ? ids[at - 1] : null,
        after: at >= 0 ? (ids[at + 1] ?? null) : null,
        inGroup: within.length > 1 ? next.id : null,
      };
    }

    bar() {
      this.to = this.neighbours();
      const link = (id, text, key) =>
        id === null
          ? el("span", { class: "faint off" }, text)
          : el("a", { class: "button", href: RK.href("episode", id), title: `key ${key}` }, text);
      return el(
        "nav",
        { class: "topbar", "aria-label": "Episodes" },
        el("a", { class: "button", href: "#", title: "key Esc" }, "Overview"),
        link(this.to.before, "← previous", "p"),
        link(this.to.after, "next →", "n"),
        link(this.to.inGroup, "next in group", "g"),
        el("span", { class: "faint keys" }, "Keys: j k steps, n p episodes, g group, Esc back"),
      );
    }

    head() {
      this.heading = el("h2", { tabindex: -1, class: "stranger", dir: "auto" }, this.episode.id);
      return RK.episodeHead(this.episode, this.group, this.heading);
    }

    // All steps in a row

    strip() {
      const { steps } = this.episode;
      if (!steps.length) return null;
      const key = "peer";
      this.cells = steps.map((step, t) =>
        el(
          "a",
          {
            class: `cell ${RK.heat(step[key], this.scales[key])}`,
            href: RK.href("episode", this.episode.id, t),
            title: this.toldOf(step),
            "aria-label": `step ${t}, ${RK.signed(step[key])} beside its peers`,
          },
          step[key] > 0 ? "+" : step[key] < 0 ? "−" : "·",
        ),
      );
      const hidden = !this.isCredited || !this.scales.peer; // a row of equal cells shows nothing
      return el("nav", { class: "strip", "aria-label": "Steps", hidden }, this.cells);
    }

    toldOf(step) {
      return `step ${step.index}: ${RK.cut(step.action, 80)}; reward ${RK.signed(step.reward)}, G ${RK.signed(step.ret)}, A ${RK.signed(step.A)}`;
    }

    // The success probability before the steps, if measured.
    success() {
      if (!RK.successCurves || !this.episode.curves.length) return null;
      this.curves = RK.successCurves(this.episode, this.container.clientWidth, (t) => {
        this.select(t);
        this.reveal(t);
      });
      return this.curves.element;
    }

    creditPart() {
      if (!this.episode.steps.length) return null;
      this.hasTree = this.group.episodes.length > 1;
      this.credit = el(
        "details",
        { class: "group-part", open: this.isCredited, ontoggle: () => this.drawTree() },
        el("summary", null, this.hasTree ? "Credit: the group side by side" : "Credit"),
        RK.creditTold(this.episode),
        RK.tiedNote(this.group),
        this.tree,
      );
      return this.credit;
    }

    drawTree() {
      if (this.hasTree && this.credit.open && this.tree.isConnected)
        RK.tree(this.tree, this.group, this.episode.index, this.current ?? 0);
    }

    // The conversation

    before() {
      const messages = this.episode.messages.filter((message) => message.step === 0 && message.role !== "assistant");
      const isThere = messages.length || !this.episode.steps.length;
      const all = this.episode.steps.length ? messages : this.episode.messages;
      return isThere
        ? el(
            "section",
            { class: "prelude", "aria-label": "Before the first step" },
            RK.chat(all),
            all.length ? null : el("p", { class: "faint" }, "No messages in this step."),
          )
        : null;
    }

    // An action and its outcome: everything up to the next action.
    messagesOf(t) {
      const { messages, steps } = this.episode;
      const begin = steps[t].message;
      if (begin === null) return null;
      let end = begin + 1;
      while (
        end < messages.length &&
        !(messages[end].role === "assistant" && messages[end].step !== null && messages[end].step > t)
      )
        end += 1;
      return messages.slice(begin, end);
    }

    // The reward of a step if some step of the episode has one; the figures beside a credited step have it already.
    rewardTold(step) {
      return this.hasRewards && !this.isCredited ? [`reward ${RK.signed(step.reward)}`] : [];
    }

    // The credit of a step, beside it.
    side(t) {
      const step = this.episode.steps[t];
      const anchor = this.anchors.get(t);
      const others = anchor ? anchor.members.length - 1 : 0;
      const key =
        step.key === null
          ? null
          : step.key.length > 40 || /^[0-9a-f]{32,}$/.test(step.key)
            ? `${RK.cut(step.key, KEY_SHOWN)}…`
            : step.key;
      return el(
        "div",
        { class: "step-side" },
        numbersOf(step, this.scales),
        el(
          "p",
          { class: "state faint" },
          key === null
            ? "no state recorded"
            : [
                "state ",
                el("span", { class: "stranger", title: RK.cut(step.key, 300) }, key),
                el("br"),
                others ? `${RK.count(others)} peer${others === 1 ? "" : "s"}` : "no peers",
              ],
        ),
      );
    }

    card(t) {
      const step = this.episode.steps[t];
      const messages = this.messagesOf(t);
      const own = messages?.[0];
      const isTold = own && (own.text || own.calls.length || own.reasoning); // the message of terminate is empty
      const card = el(
        "li",
        {
          class: this.isCredited ? "step" : "step whole",
          tabindex: -1,
          "aria-label": this.toldOf(step),
          value: t,
          onclick: () => this.select(t, { isQuiet: true }),
        },
        el(
          "div",
          { class: "step-main" },
          el(
            "div",
            { class: "step-title" },
            el("a", { href: RK.href("episode", this.episode.id, t) }, `Step ${t}`),
            step.is_valid === false ? el("span", { class: "tag bad" }, "invalid action") : null,
            step.tool_errors.length ? el("span", { class: "tag bad" }, "tool error") : null,
            RK.successTags?.(this.episode, t),
            el(
              "span",
              { class: "usage" },
              [...this.rewardTold(step), ...RK.usageTold(step, this.has)].map((one) => el("span", null, one)),
            ),
          ),
          isTold ? null : el("div", { class: "message assistant" }, RK.folded(step.action)),
          messages ? RK.chat(messages) : null,
          step.reward_reason
            ? el("p", { class: "faint stranger" }, `reward: ${RK.cut(step.reward_reason, 400)}`)
            : null,
        ),
        this.isCredited ? this.side(t) : null,
        el("div", { class: "step-more", hidden: true }),
      );
      this.cards.set(t, card);
      return card;
    }

    // Render the steps around one.
    shows(t) {
      const { steps } = this.episode;
      const begin = steps.length <= MANY ? 0 : Math.max(0, Math.min(t - MANY / 4, steps.length - MANY));
      this.begin = Math.floor(begin);
      this.end = Math.min(steps.length, this.begin + MANY);
      this.cards.clear();
      const more = (text, to) =>
        el("li", { class: "more" }, el("button", { type: "button", onclick: () => this.select(to) }, text));
      this.list.replaceChildren(
        ...[
          this.begin > 0
            ? more(`${RK.count(this.begin)} earlier steps: show step ${this.begin - 1}`, this.begin - 1)
            : null,
          ...steps.slice(this.begin, this.end).map((_, place) => this.card(this.begin + place)),
          this.end < steps.length
            ? more(`${RK.count(steps.length - this.end)} more steps: show step ${this.end}`, this.end)
            : null,
        ].filter(Boolean),
      );
    }

    after() {
      const stop = el("span", { class: "stranger" }, this.episode.stop);
      return el("p", { class: "the-end" }, "Stop reason: ", stop);
    }

    // Go to a step. A quiet one was clicked, so it is already in view.
    select(t, { isQuiet = false } = {}) {
      const { steps } = this.episode;
      if (!steps.length || t === this.current) return;
      const at = Math.max(0, Math.min(t, steps.length - 1));
      if (at < this.begin || at >= this.end) this.shows(at);
      this.leave();
      this.current = at;
      const card = this.cards.get(at);
      card.classList.add("current");
      card.setAttribute("aria-current", "step");
      this.fill(card.lastElementChild, at);
      this.cells[at].setAttribute("aria-current", "step");
      const strip = this.cells[at].parentElement;
      strip.scrollLeft = this.cells[at].offsetLeft - strip.clientWidth / 2;
      RK.replace(RK.href("episode", this.episode.id, at));
      this.drawTree();
      this.curves?.mark(at);
      if (!isQuiet) this.reveal(at);
    }

    reveal(t) {
      const card = this.cards.get(t);
      card.scrollIntoView({ block: "start" });
      card.focus({ preventScroll: true });
    }

    leave() {
      if (this.current === null) return;
      const card = this.cards.get(this.current);
      if (card) {
        card.classList.remove("current");
        card.removeAttribute("aria-current");
        card.lastElementChild.hidden = true;
        card.lastElementChild.replaceChildren();
      }
      this.cells[this.current].removeAttribute("aria-current");
    }

    fill(more, t) {
      more.hidden = false;
      const anchor = this.anchors.get(t);
      const peers = anchor || this.isCredited ? peersOf(this.group, anchor, [this.episode.index, t], this.scales.A) : "";
      const folded = () => el("details", null, el("summary", null, "Other actions in this state"), peers);
      more.replaceChildren(this.isCredited || !peers ? peers : folded(), RK.labelBox(this.episode, t));
      if (RK.tokens && this.episode.tokens) {
        const tokens = el("div");
        more.append(el("h4", null, "Tokens"), tokens);
        RK.tokens(tokens, this.episode, t);
      }
    }

    keys() {
      const step = (by) => () => this.select(this.current === null ? 0 : this.current + by);
      const open = (id) => () => {
        if (id !== null) RK.go(RK.href("episode", id));
      };
      return {
        j: step(1),
        k: step(-1),
        ArrowRight: step(1),
        ArrowLeft: step(-1),
        n: open(this.to.after),
        p: open(this.to.before),
        g: open(this.to.inGroup),
        Escape: () => RK.go("#"),
      };
    }
  }

  let page = null;
  const wanted = (part) => (/^\d+$/.test(part ?? "") ? Number(part) : null);

  RK.view("episode", async (container, [id, step], isCurrent) => {
    const isSame = page?.episode.id === id && page.heading.isConnected;
    if (!isSame) {
      container.replaceChildren(el("p", { class: "faint", role: "status" }, "Loading the episode …"));
      const group = await RK.groupWith(id);
      if (!isCurrent()) return;
      page = new EpisodePage(
        container,
        group,
        group.episodes.find((one) => one.id === id),
      );
      document.title = `${RK.shown(id, 60)} · reward-kit`;
    }
    RK.setKeys(page.keys());
    const at = wanted(step);
    if (at !== null && page.episode.steps.length) return page.select(at);
    window.scrollTo(0, 0);
    page.drawTree();
    page.heading.focus({ preventScroll: true });
  });
})();
