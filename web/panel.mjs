// The panel in ComfyUI's sidebar: when it asks, what it shows, what its buttons do. It is built once, and an update only
// patches texts and attributes, so that focus stays where it is. ComfyUI tells no tab that another one takes its place:
// the panel looks for itself, and then stops all it does.
const POLL = 2000, PATIENCE = 5000, GIVE_UP = 20000, REFUSED = 10000; // milliseconds
const DOING = { park: "parking", restore: "restoring", stop: "stopping" };
const NOTHING = { park: "nothing_loaded", restore: "nothing_parked", stop: "none" };
const NO_GROUP = { id: "", state: "stopped", stage: "stopped", ranks: [], slots: [] };
const FOREIGN = ["asking", "mismatch", "noserver"]; // troubles that leave no state to show

/** Change a text in place: a new text node would be an added node. */
function put(node, text) {
  if (node.firstChild.data !== text) node.firstChild.data = text;
  node.hidden = text === "";
}

function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** `why` is "" where it may be pressed; undefined takes it away, but never from under the finger. */
function allow(button, why, text = button.firstChild.data) {
  put(button, text);
  button.hidden = why === undefined && document.activeElement !== button;
  attribute(button, "aria-disabled", why === "" ? null : "true");
  attribute(button, "title", why || null);
}

const onPress = (button, press) => button.addEventListener("click", () => button.getAttribute("aria-disabled") || press());

export class Panel {
  constructor(seam, view, wordsOf, html, version) {
    Object.assign(this, { seam, view, wordsOf, version, templates: new DOMParser().parseFromString(html, "text/html") });
    Object.assign(this, { state: null, trouble: "asking", seq: -1, asking: false, asked: 0, due: 0, answered: 0 });
    Object.assign(this, { seen: new Set(), unread: false, stalled: false }); // incidents, and what the tab's mark is for
    Object.assign(this, { parents: new Set(), pending: new Map(), refusals: new Map() }); // by group: asked, refused
  }

  get w() {
    const locale = this.seam.locale();
    if (locale !== this.locale) Object.assign(this, { locale, spoken: this.wordsOf(locale) });
    return this.spoken;
  }

  get open() { return this.timer !== undefined; }
  wake() { this.due = 0; } // an open panel asks with its next tick
  fail(trouble) { this.trouble = trouble; this.mark({ stalled: false }); this.draw(); }
  mark(changes) { Object.assign(this, changes).seam.badge(this.unread || (this.stalled && !this.open) ? "!" : ""); }

  /** ComfyUI calls this more than once, also with an element that still holds another tab. */
  show(parent) {
    if (this.built !== this.w.language) this.build();
    if (parent.firstChild !== this.root || parent.children.length > 1) parent.replaceChildren(this.root);
    this.parents.add(parent);
    (this.others ??= new MutationObserver(() => this.tick())).observe(parent, { childList: true });
    this.timer ??= setInterval(() => this.tick(), 250);
    if (Date.now() - this.answered > PATIENCE) this.trouble = "asking";
    // Not while ComfyUI draws: it would draw again for everything that is read here.
    queueMicrotask(() => (this.draw(), this.tick()));
  }

  hide() {
    if (!this.open) return;
    // App Mode has an element of its own for the same tab: the other is still there when it goes.
    const left = [...this.parents].find((one) => one.isConnected && !one.contains(this.root));
    if (left && this.seam.tabIsOpen()) return this.show(left);
    this.timer = clearInterval(this.timer);
    this.others.disconnect();
    this.parents.clear();
    this.dialog.close(); // or it would come back open, and not as a dialog
    this.root.remove();
  }

  tick() {
    if (!this.open) return;
    if (!this.root.isConnected || !this.seam.tabIsOpen()) return this.hide();
    const now = performance.now(), visible = !document.hidden && this.root.checkVisibility();
    if (this.asking && now - this.asked > PATIENCE) this.fail("offline");
    if (visible && !this.asking && now >= this.due) this.ask();
    this.mark({ unread: this.unread && !visible });
    for (const [id, { until }] of this.refusals) if (now > until && this.refusals.delete(id)) this.draw();
  }

  async ask() {
    Object.assign(this, { asking: true, asked: performance.now(), due: performance.now() + POLL });
    const answer = await this.seam.request("/sharded/state", { signal: AbortSignal.timeout(GIVE_UP) }).catch(() => null);
    const state = answer?.ok ? await answer.json().catch(() => null) : null;
    this.asking = false;
    if (state) this.accept(state);
    else this.fail(answer?.status === 404 ? "noserver" : "offline");
  }

  accept(state) {
    if (state.api !== 1 || state.version !== this.version) return this.fail("mismatch");
    if (state.server !== this.state?.server) this.pending.clear();
    else if (state.seq < this.seq) return; // an event that came meanwhile is newer
    this.answered = Date.now();
    this.trouble = "";
    this.take(state);
  }

  take(state) {
    Object.assign(this, { state, seq: state.seq });
    for (const [id, { seq, until }] of this.pending) {
      const going = state.groups.some((one) => one.id === id && (state.seq <= seq || one.state === "busy" || one.stopping));
      if (!going || performance.now() > until) this.pending.delete(id);
    }
    this.draw();
  }

  /** An event tells of the groups what cannot wait for the next answer; what it lacks of one at rest is asked for now. */
  heard({ api, server, seq, groups }) {
    if (api !== 1) return this.wake();
    this.mark({ stalled: groups.some((one) => one.stalled) });
    if (server !== this.state?.server) return this.wake();
    if (seq < this.seq || FOREIGN.includes(this.trouble)) return;
    const merge = (one, old = NO_GROUP) => {
      if ((one.stage !== old.stage && one.state !== "busy") || (one.stalled && !old.stalled)) this.wake();
      return { ...old, ...one, idle: one.stage === old.stage ? old.idle : null, stalled: one.stalled ? old.stalled : null };
    };
    this.take({ ...this.state, seq, groups: groups.map((one) => merge(one, this.state.groups.find(({ id }) => id === one.id))) });
  }

  incident(incident) {
    if (incident.api !== 1 || this.seen.has(incident.id)) return;
    this.seen.add(incident.id);
    const message = this.view.toastOf(incident, this.w), { setting } = this.seam;
    if (setting("Sharded.Notify.Problems")) this.seam.toast({ ...message, id: incident.id });
    if (message.failed && setting("Sharded.Panel.OpenOnProblem")) this.seam.openTab();
    this.mark({ unread: !this.open || document.hidden });
    const others = this.state?.incidents.filter((one) => one.id !== incident.id);
    if (others) this.state.incidents = [incident, ...others].slice(0, 3);
    this.draw();
  }

  /** The state for who needs it with the panel closed: asked for once, later whatever the panel has heard last. */
  machine() { return Promise.resolve((this.first ??= this.state ?? this.ask())).then(() => this.state); }

  // ---- what the user wants

  /** Ask for an action; "" when it has begun, else why not, which the card shows for a while. */
  async act(group, action) {
    const { t, span, refusal } = this.w, { running, seconds } = this.view.stopCosts(group);
    const text = t("stop_text", { time: seconds ? t("about", { time: span(seconds) }) : "" });
    if (action === "stop" && running && !(await this.seam.confirm(t("stop_title"), text))) return "";
    this.refusals.delete(group.id);
    this.pending.set(group.id, { action, seq: this.seq, until: performance.now() + GIVE_UP });
    this.draw();
    const headers = { "Content-Type": "application/json" }, body = JSON.stringify({ action, group: group.id });
    const answer = await this.seam.request("/sharded/group", { method: "POST", headers, body }).catch(() => null);
    const reason = answer?.ok ? "" : refusal((await answer?.json().catch(() => null)) ?? {}) || t("offline");
    if (reason) this.refusals.set(group.id, { text: reason, until: performance.now() + REFUSED }) && this.pending.delete(group.id);
    this.draw();
    return reason;
  }

  /** What a command or a button asks of all: on every group that can, or a message why none can. */
  async command(action) {
    if (action !== "copy" || !this.open) await this.ask();
    const { w, view, seam, state, trouble } = this, groups = trouble ? [] : state.groups;
    if (action === "copy") return seam.copy(view.diagnostics(state, this.version, navigator.userAgent));
    const say = (text, severity = "info", seconds = 6) => text && seam.toast({ severity, seconds, title: w.t(action), text });
    const why = groups.map((one) => view.card(one, state, w).buttons[action]);
    if (!why.includes("")) say(why.find(Boolean) ?? w.t(trouble || NOTHING[action]));
    for (const group of groups.filter((_, at) => why[at] === "")) say(await this.act(group, action), "error", 10);
  }

  async help() {
    const { seam, w, page, dialog } = this;
    const read = (name) => fetch(seam.fileUrl(`docs/${name}.md`)).then((answer) => (answer.ok ? answer.text() : ""), () => "");
    const own = w.language !== "en" && (await read(`GroupPanel/${w.language}`));
    const text = own || (await read("GroupPanel")) || w.t("offline"), html = seam.markdown(text, seam.fileUrl("docs"));
    page[html ? "innerHTML" : "textContent"] = html ?? text;
    dialog.showModal();
  }

  // ---- the document

  /** A template's element with its texts; its parts by name, in `parts`. */
  stamp(name) {
    const root = document.importNode(this.templates.getElementById(name).content.firstElementChild, true), { t } = this.w;
    for (const node of root.querySelectorAll("[data-text]")) node.textContent = t(node.dataset.text);
    for (const node of root.querySelectorAll("[data-label]")) node.setAttribute("aria-label", t(node.dataset.label));
    root.parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
    for (const node of [root, ...Object.values(root.parts)]) if (!node.firstChild) node.append("");
    return root;
  }

  /** As many children as there are data, each kept for what comes at its place. */
  fill(parent, data, name, update, id = name) {
    while (parent.children.length > data.length) parent.lastElementChild.remove();
    while (parent.children.length < data.length) {
      const child = parent.appendChild(this.stamp(name));
      child.dataset.testid = `sharded-${id}-${parent.children.length - 1}`;
      if (name === "card") this.wire(child);
    }
    data.forEach((one, at) => update(parent.children[at], one, at));
  }

  copies(button, text, copy) {
    onPress(button, async () => {
      await copy();
      put(button, this.w.t("copied"));
      setTimeout(() => put(button, this.w.t(text)), 2000);
    });
  }

  build() {
    this.root?.remove();
    this.root = this.stamp("panel");
    const { parts } = this.root;
    Object.assign(this, parts, { built: this.w.language, said: "", drawn: null });
    put(parts.release, this.version);
    onPress(parts.helps, () => this.help());
    onPress(parts.close, () => this.dialog.close());
    this.dialog.addEventListener("keydown", (event) => event.stopPropagation()); // ComfyUI takes Escape, and letters
    this.root.addEventListener("copy", (event) => getSelection().isCollapsed || event.stopPropagation()); // and copies nodes
    this.copies(parts.copy, "copy_all", () => this.command("copy"));
    for (const name of ["memory", "slots", "run"]) {
      const section = parts[name], key = `sharded.open.${name}`;
      section.open = localStorage.getItem(key) !== "0";
      section.addEventListener("toggle", () => localStorage.setItem(key, section.open ? "1" : "0"));
    }
  }

  wire(card) {
    const { toggle, stop, examples, reload, copy, detail } = card.parts;
    onPress(toggle, () => this.act(card.group, card.toggles));
    onPress(stop, () => this.act(card.group, "stop"));
    onPress(examples, () => this.seam.showExamples());
    onPress(reload, () => this.seam.reload());
    this.copies(copy, "copy", () => this.seam.copy(detail.textContent));
  }

  /** What the cards show: the groups, or the one thing that is wrong. */
  shown() {
    const { state, trouble, w } = this;
    if (!state || FOREIGN.includes(trouble)) {
      const line = w.t(trouble), spoken = trouble === "asking" ? "" : line, buttons = trouble === "mismatch" ? { reload: "" } : {};
      return [{ group: NO_GROUP, phase: trouble, line, spoken, more: "", buttons, cells: [], part: null }];
    }
    const groups = state.groups.filter((one) => one.stage !== "stopped");
    const cards = (groups.length ? groups : [NO_GROUP]).map((group) => ({ group, ...this.view.card(group, state, w) }));
    const line = w.t("offline_since", { time: w.clock(this.answered) }), why = w.t("offline");
    for (const card of trouble ? cards : []) {
      for (const name of Object.keys(card.buttons)) card.buttons[name] = why;
      Object.assign(card, { part: null, more: "" }, card === cards[0] && { phase: trouble, line, spoken: why });
    }
    return cards;
  }

  draw() {
    if (!this.open) return;
    if (this.built !== this.w.language) return this.show(this.root.parentElement);
    const { state, trouble, w } = this, cards = this.shown(), told = state && !FOREIGN.includes(trouble);
    this.fill(this.cards, cards, "card", (node, card) => this.drawCard(node, card));
    const phases = cards.map((one) => one.phase + (one.failure?.id ?? "")).join();
    if (this.said !== phases) this.live.firstChild.data = cards.map((one) => one.spoken).join(" ");
    this.said = phases;
    attribute(this.root, "data-trouble", trouble || null);
    for (const section of [this.memory, this.slots, this.run]) section.hidden = !told;
    put(this.note, told ? this.view.note(state.devices, w) : "");
    if (told && this.drawn !== state.devices) this.drawFigures(state); // an event has none of them
  }

  drawCard(node, { group, phase, line, more, part, cells, columns = 1, block, failure, buttons }) {
    const { parts } = node, { t, language } = this.w, asked = this.pending.get(group.id)?.action;
    const toggles = "restore" in buttons ? "restore" : "park", doing = asked && `${t(DOING[asked])}...`;
    Object.assign(node, { group, toggles });
    attribute(node, "data-phase", phase);
    for (const [name, text] of Object.entries({ line, more })) put(parts[name], text);
    parts.bar.hidden = part === null;
    attribute(parts.bar, "value", part === null ? null : String(part));
    attribute(parts.cells, "style", `--columns:${columns}`);
    this.fill(parts.cells, cells, "cell", (cell, { gone, text }, at) => {
      put(cell, text);
      attribute(cell, "class", `${gone ? "sharded-gone " : ""}${at >= block && at % block < columns ? "sharded-block" : ""}`);
    }, "rank");
    parts.details.hidden = !failure;
    if (failure) parts.details.open ||= node.told !== failure.id;
    node.told = failure?.id;
    const { kind, text, detail } = failure ?? {}, own = ["failed", "start"].includes(kind); // an error's first line
    if (failure) put(parts.detail, own || !detail || language === "en" ? `${text}\n${detail}` : detail);
    const why = (name) => (asked && name in buttons ? doing : buttons[name]);
    attribute(parts.toggle, "data-testid", `sharded-${toggles}`);
    allow(parts.toggle, why(toggles), doing && asked !== "stop" ? doing : t(toggles));
    allow(parts.stop, why("stop"), asked === "stop" ? doing : t("stop"));
    for (const name of ["examples", "reload"]) allow(parts[name], buttons[name]);
    put(parts.refusal, this.refusals.get(group.id)?.text ?? "");
  }

  drawFigures({ devices, groups, last_run: run }) {
    this.drawn = devices;
    const { w, view, plot } = this, told = view.lastRun(run, w), { steps, median } = told;
    this.fill(this.devices, devices, "device", ({ parts }, device) => {
      const row = view.memoryRow(device, groups, w);
      for (const name of ["name", "text", "holders"]) put(parts[name], row[name]);
      for (const name of ["aria-label", "title"]) attribute(parts.bar, name, row.label);
      row.shares.forEach((share, at) => attribute(parts.bar.children[at], "style", `width:${share.toFixed(1)}%`));
    }, "gpu");
    const slots = groups.flatMap((group) => group.slots).map((slot) => view.slotLine(slot, w));
    this.fill(this.held, slots.length ? slots : [w.t("nothing_loaded")], "slot", put);
    for (const name of ["last", "peak", "median"]) put(this[name], told[name]);
    attribute(plot, "aria-label", median);
    attribute(plot, "style", steps.length < 2 ? "display:none" : null);
    const x = (at) => (100 * at) / (steps.length - 1 || 1), y = (one) => 20 - (19 * one) / (Math.max(...steps) || 1);
    const points = steps.map((one, at) => `${x(at).toFixed(1)},${y(one).toFixed(1)}`);
    attribute(plot.firstElementChild, "points", ["0,20", ...points, "100,20"].join(" "));
  }
}
