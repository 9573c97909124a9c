"use strict";
// Overview: what the runs are, whether they learn, and what they waited for.

const CHARTS = [
  { title: "Reward", series: [["reward", "reward of the step"], ["eval/reward", "held-out reward"]], wide: true, height: 250 },
  { title: "Where a step's time goes", unit: "s", series: [["time/step", "step"], ["time/wait", "of it waiting"]], height: 250 },
  { title: "Loss", series: [["loss", "loss"], ["eval/loss", "held-out loss"], ["value_loss", "critic"]] },
  { title: "Entropy", unit: "nats a token", series: [["entropy", "entropy"]] },
  { title: "KL", unit: "nats a token", series: [["mismatch_kl", "engine to trainer"], ["engine_mismatch_kl", "the same, fresh samples"], ["kl", "to the reference"]] },
  { title: "Gradient norm", series: [["grad_norm", "norm"]] },
  { title: "Length", unit: "tokens", series: [["completions/p50_length", "median"], ["completions/p90_length", "p90"], ["completions/max_length", "longest"]] },
  { title: "Truncated samples, groups of equal rewards", unit: "share", share: true, series: [["completions/clipped_ratio", "truncated"], ["frac_reward_zero_std", "equal rewards"]] },
  { title: "Throughput", unit: "trained tokens/s", series: [["perf/tokens_per_s", "tokens/s"]] },
  { title: "Waiting ratio of rounds", unit: "share", share: true, series: [["round/waiting_ratio", "waiting ratio"]] },
  { title: "Lag", unit: "optimizer steps", series: [["lag/mean", "mean"], ["lag/max", "largest"]] },
  { title: "Effective sample size", unit: "share", share: true, series: [["ess", "ESS"]] },
  { title: "Trained against drawn", unit: "share or reward", series: [["bias/length", "length"], ["bias/reward", "reward, difference"]] },
  { title: "Learning rate", series: [["learning_rate", "learning rate"]] },
];
const NUM_LAST = 20;
/** Figures of the short table of a comparison; the long one has all. */
const COMPARED = ["held_out", "reward", "main_s_per_1000_samples", "samples_per_s", "waiting_ratio", "lag_mean", "ess_mean", "waste_share"];

class Overview {
  axis = "step";
  smoothing = 0;
  hidden = new Set();

  constructor(runs, source) {
    this.runs = runs;
    this.source = source;
    this.charts = CHARTS.map((spec) => new Chart(spec));
    this.grid = element("div", { className: "charts" }, ...this.charts.map((chart) => chart.card));
    this.tiles = element("dl", { className: "tiles", hidden: runs.length > 1 });
    this.time = element("div", { className: "card", hidden: true, style: { "margin-top": "0.75rem" } });
    this.compared = element("div", { className: "stack", style: { "margin-top": "0.75rem" } });
    this.axes = element("span");
    this.more = element("select", { ariaLabel: "another figure", onchange: () => this.#add() });
    const slider = this.slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing", oninput: () => { this.smoothing = Number(slider.value); this.drawCharts(); } });
    const controls = element("div", { className: "controls" }, this.axes, element("label", {}, "smoothing", slider), element("span", { className: "space" }), this.more);
    byId("overview").replaceChildren(this.tiles, controls, this.grid, this.time, this.compared);
  }

  get shown() { return this.runs.filter((run) => run.figures && !this.hidden.has(run.number)); }

  draw() {
    drawHead(this.runs);
    if (!this.shown.length) return;
    const axes = Object.entries(AXES).filter(([axis]) => this.shown.some((run) => run.figures.x[axis]));
    this.axes.replaceChildren(segments("x axis", axes.map(([axis, text]) => [axis, text === "optimizer steps" ? "steps" : text === "samples trained" ? "samples" : text]), this.axis, (axis) => { this.axis = axis; this.drawCharts(); }));
    const names = [...new Set(this.shown.flatMap((run) => run.figures.names))].filter((name) => !this.charts.some((chart) => chart.spec.series.some(([each]) => each === name)));
    const offered = JSON.stringify(names);
    if (offered !== this.offered) {
      this.offered = offered;
      this.more.replaceChildren(element("option", { value: "" }, `add a chart: ${names.length} more figures`), ...names.sort().map((name) => element("option", { value: name, title: meaningOf(this.shown, name) }, spaced(name))));
    }
    this.more.hidden = !names.length;
    this.drawCharts();
    if (this.runs.length === 1) {
      this.#drawTiles(this.runs[0]);
      this.#drawTime(this.runs[0]);
      this.#drawConfig(this.runs[0]);
    } else {
      this.#drawComparison();
    }
  }

  drawCharts() {
    if (byId("overview").hidden) return;
    for (const chart of this.charts) {
      chart.card.hidden = false; // a hidden card has no width
      chart.draw(this.shown, this.axis, this.smoothing);
    }
  }

  async #add() {
    const name = this.more.value;
    if (!name) return;
    await this.#load(name);
    const chart = new Chart({ title: spaced(name), figure: name, unit: this.shown.map((run) => run.figures.meanings[name]?.[0]).find(Boolean), series: [[name, spaced(name)]] });
    this.charts.push(chart);
    this.grid.append(chart.card);
    this.draw();
    chart.card.scrollIntoView({ block: "nearest" });
  }

  async #load(name) {
    await Promise.all(this.runs.map(async (run) => { if (run.figures && !run.figures.y[name]) run.figures.y[name] = await this.source.figure(run.number, name); }));
  }

  /** Figures that were added by hand come again after an update. */
  async reload() {
    for (const chart of this.charts.slice(CHARTS.length)) await this.#load(chart.spec.figure);
  }

  #drawTiles(run) {
    const { figures, record } = run, last = (name) => (figures.y[name]?.[0] || []).filter((value) => value !== null);
    const mean = (values) => values.slice(-NUM_LAST).reduce((sum, value, _, all) => sum + value / all.length, 0);
    const tiles = [];
    const tile = (name, value, note, line, paint) => tiles.push([element("div", { className: "card tile" }, element("dt", {}, name), element("dd", { className: "value" }, value), element("dd", { className: "note", title: note }, note), element("canvas")), line, paint]);
    const rewards = last("reward"), steps = last("time/step"), tokens = last("perf/tokens_per_s");
    const ofRounds = last("round/reward"), short = (value) => format(+value.toPrecision(3)), few = rewards.length ? `mean of ${Math.min(NUM_LAST, rewards.length)} steps ${short(mean(rewards))}` : "";
    if (ofRounds.length) tile("reward, last round", short(ofRounds.at(-1)), `first ${short(ofRounds[0])}; ${few}`, ofRounds, colour("blue"));
    else if (rewards.length) tile("reward, last step", short(rewards.at(-1)), few, rewards, colour("blue"));
    const measured = figures.evaluations.at(-1), losses = last("loss");
    if (figures.about.command === "sft" && losses.length) tile("loss, last step", short(losses.at(-1)), `first step ${short(losses[0])}`, losses, colour("blue"));
    if (measured?.loss !== undefined) tile("held-out loss", short(measured.loss), `first ${short(figures.evaluations[0].loss)}`, figures.evaluations.map((each) => each.loss), colour("teal"));
    if (measured?.reward !== undefined) tile("held-out reward", format(+measured.reward.toPrecision(3)), `${measured.low !== null ? `${measured.low.toFixed(2)}–${measured.high.toFixed(2)}` : measured.n === 1 ? "one prompt: no interval" : "no interval"}; first ${short(figures.evaluations[0].reward)}${measured.solved === null || measured.solved === measured.reward ? "" : `; solved ${percent(measured.solved)}`}${sampling(run)}`, figures.evaluations.map((each) => each.reward), colour("teal"));
    if (steps.length) tile("seconds a step", duration(mean(steps)), `mean of ${Math.min(NUM_LAST, steps.length)} steps`, steps, colour("muted"));
    if (tokens.length) tile("trained tokens/s", format(Math.round(mean(tokens))), `${figures.y["completions/mean_length"] ? `length ${format(Math.round(mean(last("completions/mean_length"))))} tokens` : `mean of ${Math.min(NUM_LAST, tokens.length)} steps`}`, tokens, colour("muted"));
    const busy = record?.shares.filter((each) => each.lane === "trainer" && ["gradients", "step"].includes(each.cause));
    if (busy?.length) tile("trainer computes", percent(busy.reduce((sum, each) => sum + each.share, 0)), "of the recorded time", null);
    if (record && figures.about.command === "sft") tile("steps", figures.config["sft.steps"] ? `${format(figures.x.step?.at(-1) ?? 0)} / ${format(figures.config["sft.steps"])}` : format(figures.x.step?.at(-1) ?? 0), `${duration(figures.x.seconds?.at(-1) ?? 0)} of training`, null);
    else if (record?.end_s) {
      const planned = figures.config["run.rounds"], share = planned ? Math.min(1, record.rounds / planned) : null;
      const left = share && run.figures.state.kind === "written" ? `, about ${duration(record.end_s / record.rounds * (planned - record.rounds))} left` : "";
      tile("rounds", planned ? `${format(record.rounds)} / ${format(planned)}` : format(record.rounds), `${format(figures.x.step?.at(-1) ?? 0)} steps in ${duration(record.end_s)}${left}`, null);
    }
    this.tiles.replaceChildren(...tiles.map(([made]) => made));
    for (const [made, line, paint] of tiles) if (line) sparkline(made.querySelector("canvas"), line, paint);
  }

  #drawTime(run) {
    this.time.hidden = !run.record?.shares.length;
    if (!this.time.hidden) this.time.replaceChildren(element("h3", { style: { "margin-bottom": "0.5rem" } }, "Where the trainer's time went"), ...causesOf(run, "trainer"));
  }

  /** What began the run and with which config; keys that differ from their defaults are seen at once. */
  #drawConfig({ figures: { about } }) {
    const written = JSON.stringify(about);
    if (written === this.written) return; // a reader may have opened the rest
    this.written = written;
    const keys = (wanted) => about.config.filter(([, , differs]) => differs === wanted), rows = (wanted) => table(["key", "value"], keys(wanted).map(([name, value]) => [element("code", {}, name), shownValue(value)]));
    this.compared.replaceChildren(element("div", { className: "card config", id: "config" }, element("h2", {}, "Config"),
      element("p", { className: "muted small" }, [about.command && `tailrace ${about.command}`, about.version && `release ${about.version}`, "paths and what is secret are left out"].filter(Boolean).join(" · ")),
      ...(about.config.length ? [rows(true), element("details", { ontoggle: ({ target }) => { if (target.open && target.children.length === 1) target.append(rows(false)); } }, element("summary", {}, `${counted(keys(false).length, "key")} at ${keys(false).length === 1 ? "its default" : "their defaults"}`))] : [element("p", {}, "It cannot be read.")])));
  }

  #drawComparison() {
    const rows = this.runs.filter((run) => run.figures), summary = (run) => run.record?.summary || [], by = (run, name) => summary(run).find((each) => each.key === name);
    const keys = [...new Map(rows.flatMap(summary).map((each) => [each.key, each])).values()];
    const cells = (figure) => {
      const values = rows.map((run) => by(run, figure.key)), known = values.filter((each) => each && each.value !== null), best = [...known].sort((one, other) => figure.better * (other.value - one.value))[0];
      // No run is the best where they read the same, or where the intervals of the rewards overlap.
      const measured = figure.key === "held_out" ? rows.flatMap((run) => run.figures.evaluations.slice(-1)).sort((one, other) => other.reward - one.reward) : [];
      const isDivided = figure.better && known.some((each) => each.text !== best.text) && !(measured[1]?.high >= measured[0]?.low);
      return values.map((each) => [each ? each.text : "–", Boolean(isDivided && each && each.text === best.text)]);
    };
    const long = element("table", {}, element("tr", {}, element("th", {}, "figure"), ...rows.map((run) => element("th", { className: "number" }, key(runColour(run.number)), run.figures.name))),
      ...keys.map((figure) => element("tr", {}, element("td", {}, figure.label), ...cells(figure).map(([text, isBest]) => element("td", { className: `number ${isBest ? "best" : ""}` }, text)))));
    const config = [...new Set(rows.flatMap((run) => Object.keys(run.figures.config)))].filter((name) => new Set(rows.map((run) => JSON.stringify(run.figures.config[name]))).size > 1).sort();
    this.compared.replaceChildren(
      element("div", { className: "card", id: "all-figures" }, element("h2", {}, "All figures"), element("div", { className: "scroll" }, long)),
      ...(config.length ? [element("div", { className: "card", id: "config-differences" }, element("h2", {}, "Config keys that differ"), table(["key", ...rows.map((run) => run.figures.name)], config.map((name) => [element("code", {}, name), ...rows.map((run) => shownValue(run.figures.config[name]))])))] : []));
    byId("comparison")?.replaceChildren(element("table", {}, element("tr", {}, element("th", {}, "run"), ...COMPARED.filter((name) => keys.some((each) => each.key === name)).map((name) => element("th", { className: "number" }, keys.find((each) => each.key === name).label)), ...(config.length ? [element("th", {}, "differs in")] : [])),
      ...rows.map((run, at) => element("tr", {}, this.#nameCell(run), ...COMPARED.filter((name) => keys.some((each) => each.key === name)).map((name) => {
        const [text, isBest] = cells(keys.find((each) => each.key === name))[at];
        return element("td", { className: `number ${isBest ? "best" : ""}` }, text);
      }), ...(config.length ? [differencesOf(run, config)] : [])))));
  }

  #nameCell(run) {
    const box = element("input", { type: "checkbox", checked: !this.hidden.has(run.number), onchange: () => { if (box.checked) this.hidden.delete(run.number); else this.hidden.add(run.number); this.drawCharts(); } });
    return element("td", { style: { "white-space": "nowrap" } }, element("label", { style: { color: "var(--ink)", "font-weight": 560, "margin-right": "0.6rem" } }, box, key(runColour(run.number)), run.figures.name), stateChip(run, true), run.figures.simulated ? element("span", { className: "chip simulated" }, "simulated") : "");
  }
}

/** A value of a config. */
const shownValue = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
const NUM_DIFFERING = 4;

/** The keys in which a run differs from the others. */
function differencesOf(run, keys) {
  const all = keys.map((name) => `${name} = ${shownValue(run.figures.config[name])}`), more = all.length - NUM_DIFFERING;
  return element("td", { className: "differs", title: all.join("\n") }, [...all.slice(0, NUM_DIFFERING), ...(more > 0 ? [`and ${more} more`] : [])].join(", ") || "–");
}

/** Kinds of advisories that tell of a run which does not go on as it should: they are shown above every view. */
const ALARMS = ["stalled", "engine dead", "ended without closing", "longer than usual", "abort storm"];

/** The state of a run; `isShort`: in a word. */
function stateChip(run, isShort = false) {
  const { kind, text } = run.record?.state || run.figures.state;
  if (isShort && kind !== "finished") return element("span", { className: `chip ${kind}`, title: text }, { written: "is being written", awaited: "no record yet", starting: "starts", blocked: "blocked", ended: "ended without closing" }[kind] || "not finished");
  return element("span", { className: `chip ${kind}` }, run.isLive || kind === "finished" ? text : `${text} (when this page was written)`);
}

/** A lane's time by cause: a bar and what each part is. */
function causesOf(run, lane) {
  const { shares } = run.record, mine = shares.filter((each) => each.lane === lane);
  const text = (each) => `${CAUSES[each.cause]} ${percent(each.share, 1)}`;
  return [sharesBar(mine.map((each) => [each.cause, each.share])), element("div", { className: "shares" }, ...mine.filter((each) => each.share >= 0.0005).map((each) => element("span", { title: `${format(each.seconds)} s` }, key(causeColour(each.cause)), text(each))))];
}

/** The top of every view: names, states, verdicts, what a person should look at. */
function drawHead(runs) {
  const isElsewhere = byId("overview").hidden, known = runs.filter((run) => run.figures), single = runs.length === 1;
  const notices = (run) => {
    const { advisories, defects } = { advisories: run.record?.advisories || run.figures.advisories, defects: [...(run.record?.defects || []), ...run.figures.defects] };
    const name = single ? "" : `${run.figures.name}: `;
    return [...advisories.filter((each) => !isElsewhere || ALARMS.includes(each.kind)).map((each) => element("div", { className: "advisory" }, element("b", {}, `${name}${each.kind}: `), each.text)),
      ...defects.map((each) => element("div", { className: "defect" }, `${name}${each.file}${each.line ? `, line ${each.line}` : ""}: ${each.problem}${each.num_lines > 1 ? ` (and ${each.num_lines - 1} more lines)` : ""}. The rest is shown.`))];
  };
  const doing = (run) => (run.record?.state.kind === "written" && run.record.doing.length ? `${run.isLive ? "Now" : "When this page was written"}: ${run.record.doing.join(" · ")}` : "");
  if (single && known.length) {
    const [run] = known, { record, figures } = run;
    byId("head").replaceChildren(element("div", { className: "run-head" },
      element("div", { className: "run-title" }, element("h1", {}, figures.name), stateChip(run), ...(figures.simulated ? [element("span", { className: "chip simulated", title: "in virtual time: nothing was generated or trained, and there is no reward" }, "simulated")] : []), element("span", { className: "muted small" }, [figures.about.command !== "sft" && figures.config["schedule.name"], String(figures.config["model.path"] || "").split("/").at(-1)].filter(Boolean).join(" · "))),
      element("p", { className: "verdict", hidden: isElsewhere }, record ? verdictOf(run) : "reading the events …"), element("p", { className: "doing", hidden: !doing(run) }, doing(run)),
      element("p", { className: "cost", hidden: !figures.cost }, `Cost: ${figures.cost}`), element("div", { className: "notices", role: "status" }, ...notices(run))));
  } else if (known.length) {
    const comparison = byId("comparison") || element("div", { className: "scroll", id: "comparison" });
    byId("head").replaceChildren(element("div", { className: "run-head" }, element("h1", {}, `${runs.length} runs`),
      ...known.filter((run) => run.record && verdictOf(run)).map((run) => element("p", { className: "small", hidden: isElsewhere }, key(runColour(run.number)), element("b", {}, `${run.figures.name}: `), verdictOf(run))),
      element("div", { className: "card", hidden: isElsewhere, style: { "margin-top": "0.6rem", padding: "0.4rem 1rem" } }, comparison), element("div", { className: "notices", role: "status" }, ...known.flatMap(notices))));
  }
  document.title = known.length ? `${known.map((run) => run.figures.name).join(", ")} · tailrace` : "tailrace";
}
