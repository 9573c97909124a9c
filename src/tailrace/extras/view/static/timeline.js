"use strict";
// Timeline: the lanes of all runs on one time axis, which a reader zooms and moves.

const FETCH_AFTER_MS = 60, MIN_SPAN_S = 1e-3, PAN = 0.15, ZOOM = 1.35;

class TimelineView {
  from = 0;
  to = 0;
  follows = false;

  constructor(runs, source, openSample) {
    Object.assign(this, { runs, source, openSample });
    this.strip = element("canvas", { ariaLabel: "the whole run" });
    this.range = element("span", { className: "muted number" });
    this.note = element("p", { className: "muted small", hidden: true });
    this.panels = runs.map((run) => this.#panel(run));
    this.follow = element("button", { type: "button", ariaPressed: "false", onclick: () => this.setFollow(!this.follows) }, "follow");
    const button = (text, title, act) => element("button", { type: "button", title, onclick: act }, text);
    const group = (...buttons) => element("div", { className: "segments" }, ...buttons);
    this.keys = element("div", { className: "shares lane-keys", ariaLabel: "colours" });
    this.causes = element("div", { className: "card", style: { "margin-top": "0.75rem" } });
    this.worst = element("div", { className: "card", style: { "margin-top": "0.75rem" } });
    byId("timeline").replaceChildren(
      element("div", { className: "controls" }, group(button("whole run", "key 0", () => this.showAll()), button("last 5 rounds", "", () => this.showLast()), this.follow), group(button("−", "key S or arrow down", () => this.zoom(ZOOM)), button("+", "key W or arrow up", () => this.zoom(1 / ZOOM)), button("←", "key A", () => this.pan(-PAN)), button("→", "key D", () => this.pan(PAN))), this.range, element("span", { className: "space" }), element("span", { className: "muted small keys" }, "wheel or W S zoom · drag or A D move · shift and drag: select")),
      this.note, element("div", { className: "card strip" }, this.strip), this.keys, element("div", { className: "stack" }, ...this.panels.map((panel) => panel.card)), this.causes, this.worst);
    this.#listenToStrip();
  }

  get isHidden() { return byId("timeline").hidden; }
  get known() { return this.runs.filter((run) => run.record); }
  get end() { return Math.max(1e-3, ...this.known.map((run) => run.record.end_s)); }

  #panel(run) {
    const canvas = element("canvas", { tabIndex: 0, ariaLabel: "lanes" }), name = element("div", { className: "name", hidden: this.runs.length === 1 });
    const panel = { run, canvas, name, data: null, whole: null, asked: "", picture: new LanesPicture(canvas), card: element("div", { className: "card lanes" }, name, canvas) };
    this.#listen(panel);
    return panel;
  }

  // ---- what is shown ----

  /** After an update of the runs, and when the view is opened. */
  async draw() {
    if (this.isHidden || !this.known.length) return;
    const isFirst = !this.to;
    if (isFirst) {
      this.follows = this.known.some((run) => run.record.state.kind === "written") && this.runs.length === 1;
      if (!this.#fromHash()) this.to = this.end;
    }
    if (this.follows) this.#last();
    this.follow.hidden = !this.source.isLive || this.known.every((run) => run.record.state.kind === "finished");
    this.follow.ariaPressed = String(this.follows);
    this.note.hidden = this.source.isLive;
    this.note.textContent = "This file has the whole run in parts of equal length, and single requests of its last rounds only. `tailrace view RUN` shows each request of every round.";
    this.#drawTables();
    await Promise.all(this.panels.map((panel) => this.#load(panel, true)));
    await this.#drawStrip();
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, MIN_SPAN_S), this.end);
    this.from = Math.min(Math.max(0, from), Math.max(0, this.end - span));
    this.to = this.from + span;
    this.#redraw();
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => { this.panels.forEach((panel) => this.#load(panel)); history.replaceState(null, "", `#/timeline/${+this.from.toFixed(3)}-${+this.to.toFixed(3)}`); }, FETCH_AFTER_MS);
  }

  showAll() { this.follows = false; this.show(0, this.end); }
  showLast() { this.#last(); this.show(this.from, this.to); }
  setFollow(follows) { this.follows = follows; this.follow.ariaPressed = String(follows); if (follows) this.showLast(); }
  #last() { this.from = Math.min(...this.known.map((run) => run.record.follow_s)); this.to = this.end; }
  zoom(factor, at = (this.from + this.to) / 2) { this.setFollow(false); this.show(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  pan(share) { this.setFollow(false); const by = share * (this.to - this.from); this.show(this.from + by, this.to + by); }

  /** Go to the range of time that the address names. */
  route() {
    if (this.to && this.#fromHash()) this.show(this.from, this.to);
  }

  #fromHash() {
    const found = /^#\/timeline\/([\d.]+)-([\d.]+)$/.exec(location.hash);
    if (!found) return false;
    [this.from, this.to] = [Number(found[1]), Math.min(Number(found[2]), this.end)];
    this.follows = false;
    return this.to > this.from;
  }

  async #load(panel, isNew = false) {
    if (!panel.run.record) return;
    const { from, to } = this, span = to - from, bins = Math.max(150, Math.min(400, Math.round((panel.canvas.clientWidth || 1000) / 2)));
    // Some room on both sides, so that a small move needs no new window.
    const asked = JSON.stringify([Math.max(0, from - span / 4), Math.min(panel.run.record.end_s, to + span / 4) || 1, bins]);
    if (asked === panel.asked && !isNew) return this.#redraw();
    panel.asked = asked;
    const [start, end, number] = JSON.parse(asked);
    const data = end > start ? decoded(await this.source.window(panel.run.number, start, end, number)) : null;
    if (panel.asked !== asked) return; // a newer one is on its way
    panel.data = data || panel.data;
    this.#redraw();
    window.tailrace.windows += 1;
  }

  #redraw() {
    if (this.isHidden) return;
    const unit = unitOf(this.to - this.from);
    this.range.textContent = `${duration(this.from, unit)} to ${duration(this.to, unit)}`;
    for (const panel of this.panels) {
      if (!panel.data) continue;
      panel.name.replaceChildren(key(runColour(panel.run.number)), panel.run.figures?.name || "");
      panel.picture.draw(panel.data, this.from, this.to, { isDense: this.runs.length > 1, lives: panel.run.record.lives, marks: panel.run.record.marks });
    }
    this.#drawWindow();
  }

  // ---- the strip: the trainer over the whole run, and the window ----

  async #drawStrip() {
    const [run] = this.known, bins = Math.max(150, Math.min(400, Math.round(this.strip.clientWidth / 2)));
    this.whole = decoded(await this.source.window(run.number, 0, Math.max(run.record.end_s, 1e-3), bins));
    this.#drawWindow();
  }

  #drawWindow() {
    if (!this.whole) return;
    const width = this.strip.clientWidth, context = canvasOf(this.strip, width, 40), lane = this.whole.lanes[0], x = (time) => time / this.end * width;
    if (lane.pieces) {
      for (const [start, end, cause] of lane.pieces) { context.fillStyle = causeColour(cause); context.fillRect(x(start), 0, Math.max(0.5, x(end) - x(start)), 40); }
    } else {
      const entries = Object.entries(lane.shares), bins = entries[0]?.[1].length || 0, { edges } = this.whole;
      for (let i = 0; i < bins; i++) {
        let top = 40;
        for (const [cause, bytes] of entries) { const part = bytes[i] / 255 * 40; top -= part; context.fillStyle = causeColour(cause); context.fillRect(x(edges[i]), top, x(edges[i + 1]) - x(edges[i]) + 0.4, part); }
      }
    }
    context.fillStyle = colour("ground");
    context.globalAlpha = 0.72;
    context.fillRect(0, 0, x(this.from), 40);
    context.fillRect(x(this.to), 0, width - x(this.to), 40);
    context.globalAlpha = 1;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(Math.max(1, x(this.from)), 1, Math.max(3, Math.min(width - 2, x(this.to)) - Math.max(1, x(this.from))), 38);
  }

  #listenToStrip() {
    let grabbed = null;
    const time = (event) => (event.clientX - this.strip.getBoundingClientRect().left) / this.strip.clientWidth * this.end;
    this.strip.addEventListener("pointerdown", (event) => {
      this.strip.setPointerCapture(event.pointerId);
      const at = time(event), isInside = at > this.from && at < this.to && this.to - this.from < 0.98 * this.end;
      this.setFollow(false);
      grabbed = isInside ? { at, from: this.from } : { at, from: null };
    });
    this.strip.addEventListener("pointermove", (event) => {
      if (!grabbed) return;
      const at = time(event), span = this.to - this.from;
      if (grabbed.from === null) { if (Math.abs(at - grabbed.at) > this.end / 200) this.show(Math.min(at, grabbed.at), Math.max(at, grabbed.at)); } else this.show(grabbed.from + at - grabbed.at, grabbed.from + at - grabbed.at + span);
    });
    this.strip.addEventListener("pointerup", (event) => {
      if (grabbed && grabbed.from === null && Math.abs(time(event) - grabbed.at) <= this.end / 200) { const half = (this.to - this.from) / 2; this.show(grabbed.at - half, grabbed.at + half); }
      grabbed = null;
    });
  }

  // ---- pointer, wheel, keys ----

  #listen(panel) {
    const { canvas, picture } = panel, tip = byId("tip");
    let down = null;
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / canvas.clientWidth);
      else this.zoom(Math.exp(event.deltaY * 0.0022), picture.time(place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) { canvas.setPointerCapture(event.pointerId); down = { at: place(event), from: this.from, to: this.to, selects: event.shiftKey, moved: false }; } });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (down) {
        const seconds = (x - down.at[0]) / picture.width * (down.to - down.from);
        down.moved ||= Math.abs(x - down.at[0]) > 4;
        if (down.moved && !down.selects) { this.setFollow(false); this.show(down.from - seconds, down.to - seconds); }
        if (down.moved && down.selects) { this.#redraw(); picture.context.fillStyle = withAlpha(colour("blue"), 0.2); picture.context.fillRect(down.at[0], 0, x - down.at[0], canvas.clientHeight); }
      }
      const found = down?.moved ? null : picture.at(x, y);
      tip.hidden = !found;
      canvas.style.cursor = found?.sample || found?.round ? "pointer" : "crosshair";
      if (!found) return;
      tip.textContent = found.text;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event), was = down;
      down = null;
      if (!was) return;
      if (was.moved && was.selects) { this.setFollow(false); this.show(...[picture.time(was.at[0]), picture.time(x)].sort((one, other) => one - other)); return; }
      const found = !was.moved && picture.at(x, y);
      if (found?.sample) { tip.hidden = true; this.openSample(panel.run, found.sample); }
      if (found?.round) { const [, start, end] = found.round; this.setFollow(false); this.show(start - 0.05 * (end - start), end + 0.05 * (end - start)); }
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  /** Whether a key was one of the timeline's. */
  onKey(name) {
    const acts = { w: () => this.zoom(1 / ZOOM), s: () => this.zoom(ZOOM), a: () => this.pan(-PAN), d: () => this.pan(PAN), 0: () => this.showAll() };
    Object.assign(acts, { arrowup: acts.w, arrowdown: acts.s, arrowleft: acts.a, arrowright: acts.d });
    if (!acts[name]) return false;
    acts[name]();
    return true;
  }

  // ---- tables ----

  #drawTables() {
    const multi = this.known.length > 1, rows = this.known.flatMap((run) => {
      const engines = run.record.engines.map((engine) => engine.name), named = engines.length > 4 ? [] : engines, prefix = multi ? `${run.figures?.name}: ` : "";
      return ["trainer", ...(multi ? named.slice(0, 2) : named)].flatMap((lane) => [element("span", {}, prefix + lane), element("div", {}, ...causesOf(run, lane))]);
    });
    const causes = [...new Set(this.known.flatMap((run) => run.record.shares.map((each) => each.cause)))], outcomes = [...new Map(Object.values(OUTCOMES).slice(0, 3).map((each) => [each[0], each]))];
    this.keys.replaceChildren(element("span", { className: "muted" }, "requests:"), ...outcomes.map(([, [paint, text]]) => element("span", {}, key(`var(--${paint})`), text)), element("span", { className: "muted" }, "trainer and engines:"), ...causes.map((cause) => element("span", {}, key(causeColour(cause)), CAUSES[cause] || cause)),
      element("span", {}, element("i", { className: "key range" }), "from the least to the most slots in use within a bar"));
    this.causes.replaceChildren(element("h2", { style: { "margin-bottom": "0.6rem" } }, "Where the time went"), element("div", { className: "causes" }, ...rows));
    const worst = this.known.flatMap((run) => run.record.stragglers.map((each) => ({ ...each, run, alone: each.end_s - each.start_s }))).filter((each) => each.alone > 0).sort((one, other) => other.alone - one.alone).slice(0, 10);
    this.worst.hidden = !worst.length;
    this.worst.replaceChildren(element("h2", {}, "Stragglers"), element("p", { className: "muted small" }, "Samples that ended last in their round, the longest alone first."),
      table([...(multi ? ["run"] : []), "round", "sample", "engine", "tokens", "seconds alone"], worst.map((each) => [...(multi ? [each.run.figures?.name] : []), each.round + 1, each.sample, each.engine, each.tokens, +each.alone.toPrecision(3)]), (at) => this.openSample(worst[at].run, worst[at].sample)));
  }
}
