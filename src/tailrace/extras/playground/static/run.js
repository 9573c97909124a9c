"use strict";
// One schedule of the page: its figures, its picture, and its lines, which the reader may change.

class RunView {
  answer = null;
  /** Lines in the editor that have not been run: those of a link, and those that are being written. */
  draft = null;

  /** `page`: has `choose(run, name)`, `remove(run)`, `lines(run, text)`. */
  constructor(name, page, setUp) {
    Object.assign(this, { name, page, setUp });
    const button = (text, act, properties = {}) => element("button", { type: "button", className: "plain", onclick: act, ...properties }, text);
    this.select = element("select", { ariaLabel: "schedule", onchange: () => page.choose(this, this.select.value) });
    this.figures = element("dl", { className: "figures" });
    this.canvas = element("canvas", { role: "img" });
    this.picture = new LanesPicture(this.canvas);
    this.problem = element("p", { className: "defect", role: "alert", hidden: true });
    this.editor = element("textarea", { spellcheck: false, ariaLabel: "lines of the schedule", oninput: () => this.#edited(), onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#run(); } });
    this.run = button("run these lines", () => this.#run(), { className: "plain main", title: "Ctrl and Enter" });
    this.restore = button("published lines", () => this.#restore());
    this.note = element("span", { className: "muted small" });
    this.acts = element("div", { className: "acts" }, this.run, this.restore, this.note);
    this.close = button("×", () => page.remove(this), { title: "take it away", ariaLabel: "take the schedule away" });
    this.card = element("section", { className: "card run" },
      element("header", {}, this.select, this.figures, this.close), this.problem,
      element("div", { className: "pair" }, element("div", { className: "picture" }, this.canvas),
        element("div", { className: "lines" }, this.editor, this.acts)));
    this.#listen();
  }

  /** The lines that are run in place of the published ones, or null. */
  get lines() { return this.setUp.lines[this.name] ?? null; }
  get published() { return this.setUp.schedules[this.name]; }

  /** Fill what depends on the name. `draft`: lines of a link, which are shown and not run. */
  open(draft = null) {
    this.select.replaceChildren(...Object.keys(this.setUp.schedules).map((name) => element("option", { value: name, selected: name === this.name, disabled: name !== this.name && this.setUp.names.includes(name) }, name)));
    this.draft = draft;
    this.editor.value = draft ?? this.lines ?? this.published;
    this.editor.rows = Math.min(16, this.editor.value.trimEnd().split("\n").length);
    this.#state();
  }

  #state() {
    const isOwn = this.editor.value !== this.published;
    this.run.hidden = this.draft === null;
    this.restore.hidden = !isOwn;
    this.acts.hidden = this.run.hidden && this.restore.hidden;
    this.note.textContent = this.draft !== null && this.isStranger ? "These lines came with the link. Nothing of them has run." : isOwn && this.draft === null ? "Your lines, in place of the published ones." : "";
  }

  #edited() { this.draft = this.editor.value; this.isStranger = false; this.#state(); }
  #run() { if (this.draft === null) return; this.isStranger = false; this.page.lines(this, this.draft === this.published ? null : this.draft); this.open(); }
  #restore() { this.isStranger = false; this.page.lines(this, null); this.open(); }

  /** Show an answer of the simulator. */
  show(answer) {
    this.problem.hidden = !answer.problem;
    this.problem.textContent = answer.problem || "";
    if (answer.problem) { this.answer = null; this.figures.replaceChildren(); this.canvas.hidden = true; return; }
    this.answer = answer;
    this.canvas.hidden = false;
    const { figures } = answer, shown = [
      [`step of ${format(answer.samples)} samples`, `${format(+figures.step_s.toPrecision(3))} s`], ["trainer waits", percent(figures.waiting_ratio)], ["engines wait", percent(figures.engines_wait)],
      ["lag", `${figures.lag_mean.toFixed(1)} steps`], ["wasted", percent(figures.waste_share)],
    ];
    this.figures.replaceChildren(...shown.map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value))));
    this.canvas.ariaLabel = `${this.name}: ${shown.map((each) => each.join(" ")).join(", ")}`;
  }

  /** Draw the picture on the time axis of all. */
  draw(end) { if (this.answer) this.picture.draw(this.answer.window, 0, end, { isDense: true }); }

  #listen() {
    const tip = byId("tip");
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect(), found = this.answer && this.picture.at(event.clientX - box.left, event.clientY - box.top);
      tip.hidden = !found;
      if (!found) return;
      tip.textContent = found.text.replace("\nclick to zoom", "");
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    this.canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}

/** Who is fastest, and what it costs. `runs`: those with an answer. */
function verdictOfRuns(runs) {
  if (!runs.length) return "";
  const step = (run) => run.answer.figures.step_s, best = runs.reduce((one, other) => (step(other) < step(one) ? other : one));
  const base = runs.find((run) => run.name === "serial") || runs.reduce((one, other) => (step(other) > step(one) ? other : one)), { figures } = best.answer;
  const cost = [];
  if (figures.lag_mean >= 0.05) cost.push(`its tokens are ${figures.lag_mean.toFixed(1)} optimizer steps old in the mean`);
  if (figures.waste_share >= 0.005) cost.push(`${percent(figures.waste_share)} of them are wasted`);
  if (figures.length_mean < 0.9 * base.answer.figures.length_mean) cost.push(`its samples are ${percent(1 - figures.length_mean / base.answer.figures.length_mean)} shorter than those of ${base.name}`);
  const price = cost.length ? `: ${cost.length > 1 ? `${cost.slice(0, -1).join(", ")} and ${cost.at(-1)}` : cost[0]}` : ", and it costs nothing: no token is old, and none is wasted";
  if (best === base) return `${best.name} is the fastest here${price}.`;
  return `${best.name} is the fastest here, ${(step(base) / step(best)).toFixed(1)} times as fast as ${base.name}${price}.`;
}
