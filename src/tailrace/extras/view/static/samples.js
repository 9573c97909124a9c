"use strict";
// Samples: texts first, by prompt. A list of groups, and the group that is read.

const KINDS = [["trained", "trained"], ["held-out", "held-out"], ["failed", "without reward"]];
const ORDERS = [["newest", "newest first"], ["best", "best first"], ["worst", "worst first"], ["spread", "most divided first"], ["longest", "longest first"]];
const ONLY = { all: ["all", () => true], truncated: ["truncated", (row) => row.finish_reason === "length"], straggler: ["stragglers", (row, view) => view.stragglers.has(row.id)], failed: ["failed", (row) => row.reward === null || Boolean(row.failure)] };
const NUM_SHOWN = 60, ANSWERS = /^(answer|answers|solution|target|label|ground_truth|expected|reward_model)$/i;

class SamplesView {
  constructor(runs, source) {
    Object.assign(this, { runs, source, run: runs[0], kind: "trained", order: "newest", only: "all", search: "", lastRound: null, rows: [], groups: [], group: null, sample: null, colour: "version" });
    const choice = (label, choices, act) => { const made = element("select", { ariaLabel: label, onchange: () => act(made.value) }, ...choices.map(([value, text]) => element("option", { value }, text))); return made; };
    this.runs_ = choice("run", runs.map((run) => [String(run.number), String(run.number)]), (value) => { this.run = runs[Number(value)]; this.load(); });
    this.order_ = choice("order", ORDERS, (value) => { this.order = value; this.drawList(); });
    this.only_ = choice("only", Object.entries(ONLY).map(([value, [text]]) => [value, text]), (value) => { this.only = value; this.drawList(); });
    this.round = element("input", { type: "search", placeholder: "up to round …", size: 12, ariaLabel: "up to round", onchange: () => { const text = this.round.value.trim(); this.lastRound = /^\d+$/.test(text) ? Number(text) - 1 : null; this.load(); } });
    this.find = element("input", { type: "search", placeholder: "search texts", ariaLabel: "search", oninput: () => { clearTimeout(this.waiting); this.waiting = setTimeout(() => { this.search = this.find.value; this.load(); }, 250); } });
    this.count = element("span", { className: "muted" });
    this.list = element("div", { className: "card groups", tabIndex: 0 });
    this.pane = element("div", { className: "card pane" });
    byId("samples").replaceChildren(element("div", { className: "controls" }, this.runs_, segments("kind", KINDS, this.kind, (kind) => { this.kind = kind; this.load(); }), this.order_, this.only_, this.find, this.round, this.count), element("div", { className: "reader" }, this.list, this.pane));
  }

  get isHidden() { return byId("samples").hidden; }
  get stragglers() { return new Set((this.run.record?.stragglers || []).map((each) => each.sample)); }

  async load() {
    if (this.isHidden) return;
    this.runs_.hidden = this.runs.length < 2;
    this.runs.forEach((run, at) => { if (run.figures) this.runs_.options[at].textContent = run.figures.name; });
    const asked = this.asked = JSON.stringify([this.run.number, this.kind, this.lastRound, this.search]);
    const { samples, defects } = await this.source.samples(this.run.number, this.kind, this.lastRound, this.search);
    if (asked !== this.asked) return;
    Object.assign(this, { rows: samples, defects });
    this.drawList();
  }

  /** Samples of a prompt that began together stand together. */
  #grouped() {
    const [, isWanted] = ONLY[this.only], groups = new Map();
    for (const row of this.rows) {
      const name = row.id.slice(0, row.id.lastIndexOf("/"));
      if (!groups.has(name)) groups.set(name, { name, rows: [], prompt: row.prompt, round: row.round, step: row.step });
      groups.get(name).rows.push(row);
    }
    const reward = (row) => row.reward ?? -Infinity, of = (group, pick) => pick(...group.rows.map(reward));
    const orders = {
      newest: () => 0, best: (one, other) => of(other, Math.max) - of(one, Math.max), worst: (one, other) => of(one, Math.min) - of(other, Math.min),
      spread: (one, other) => of(other, Math.max) - of(other, Math.min) - (of(one, Math.max) - of(one, Math.min)),
      longest: (one, other) => Math.max(...other.rows.map((row) => row.num_tokens)) - Math.max(...one.rows.map((row) => row.num_tokens)),
    };
    return [...groups.values()].filter((group) => group.rows.some((row) => isWanted(row, this))).sort((one, other) => orders[this.order](one, other) || 0);
  }

  /** The sample of a group that a reader of this order and filter wants to see first. */
  #first(group) {
    const [, isWanted] = ONLY[this.only], rows = group.rows.filter((row) => isWanted(row, this)), by = (compare) => [...rows].sort(compare)[0];
    if (this.order === "best") return by((one, other) => other.reward - one.reward);
    if (this.order === "worst") return by((one, other) => one.reward - other.reward);
    return this.order === "longest" ? by((one, other) => other.num_tokens - one.num_tokens) : rows[0] || group.rows[0];
  }

  drawList() {
    this.groups = this.#grouped();
    const number = this.groups.reduce((sum, group) => sum + group.rows.length, 0);
    this.count.textContent = number ? `${format(number)} samples of ${format(this.groups.length)} prompts${this.rows.length >= 2000 ? " (the newest ones)" : ""}` : "";
    this.list.replaceChildren(...this.groups.slice(0, NUM_SHOWN).map((group) => this.#item(group)));
    if (this.groups.length > NUM_SHOWN) this.list.append(this.#more(NUM_SHOWN));
    if (!this.groups.length) {
      const none = this.rows.length ? "No sample is so." : this.search ? "No sample has this text." : this.kind === "failed" ? "Every sample has a reward." : "There are no samples yet. A simulation has none: it counts tokens.";
      this.list.replaceChildren(element("div", { className: "empty" }, none));
    }
    for (const each of this.defects || []) this.list.prepend(element("div", { className: "defect" }, `${each.file}, line ${each.line}: ${each.problem}. The rest is shown.`));
    const same = this.groups.find((group) => group.name === this.group?.name);
    if (same) this.group = same;
    else if (this.groups.length) this.open(this.#first(this.groups[0]).id);
    else this.pane.replaceChildren();
    this.#mark();
  }

  #more(from) {
    const button = element("button", { className: "group muted", type: "button" }, `${format(this.groups.length - from)} more prompts`);
    button.onclick = () => { button.replaceWith(...this.groups.slice(from, from + NUM_SHOWN).map((group) => this.#item(group)), ...(this.groups.length > from + NUM_SHOWN ? [this.#more(from + NUM_SHOWN)] : [])); };
    return button;
  }

  #item(group) {
    const first = this.#first(group), place = [group.step !== null && group.step !== undefined ? `step ${group.step}` : group.round !== null ? `after round ${group.round}` : "", `prompt ${group.name}`].filter(Boolean).join(" · ");
    const item = element("button", { className: "group", type: "button", onclick: () => this.open(first.id) },
      element("span", { className: "prompt" }, group.prompt || `sample ${first.id}`), element("span", { className: "text" }, first.failure || first.text),
      element("span", { className: "meta" }, element("span", { className: "dots" }, ...group.rows.slice(0, 32).map((row) => rewardDot(row))), place));
    item.dataset.group = group.name;
    return item;
  }

  #mark() {
    for (const item of this.list.querySelectorAll(".group")) item.ariaCurrent = String(item.dataset.group === this.group?.name);
  }

  /** The sample before or after the one that is read, over the borders of groups. */
  step(by) {
    const all = this.groups.flatMap((group) => group.rows.map((row) => row.id)), at = all.indexOf(this.sample?.id);
    if (all.length) this.open(all[Math.max(0, Math.min(all.length - 1, at + by))], true);
  }

  onKey(name) {
    const by = { arrowleft: -1, arrowright: 1, k: -1, j: 1 }[name];
    if (by) this.step(by);
    return Boolean(by);
  }

  async open(id, scrolls = false) {
    const asked = this.opening = id, sample = await this.source.sample(this.run.number, id);
    if (asked !== this.opening) return;
    this.sample = sample;
    const name = id.slice(0, id.lastIndexOf("/"));
    this.group = this.groups.find((group) => group.name === name) || { name, rows: [], prompt: sample.record.prompt, round: null };
    // The columns of a row stand with the first sample of a group.
    const withColumns = this.group.rows[0] && this.group.rows[0].id !== id && !sample.record.columns ? await this.source.sample(this.run.number, this.group.rows[0].id) : sample;
    this.columns = withColumns.record?.columns || {};
    this.#mark();
    if (scrolls) this.list.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
    this.#drawPane();
  }

  #drawPane() {
    const { sample, group } = this, { record } = sample, part = (title, ...content) => element("div", { className: "part" }, element("h3", {}, title), ...content);
    const columns = Object.entries(this.columns).filter(([name]) => name !== "prompt").sort(([one], [other]) => ANSWERS.test(other) - ANSWERS.test(one));
    const rewards = [["reward", record.reward], ["advantage", record.advantage], ...Object.entries(record.rewards || {}), ...Object.entries(record.reward_columns || {})].filter(([, value]) => value !== undefined && value !== null);
    const facts = (entries) => element("dl", { className: "facts" }, ...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", { className: ANSWERS.test(name) ? "answer" : "" }, typeof value === "number" ? format(value) : typeof value === "string" ? value : JSON.stringify(value))]));
    const ended = record.finish_reason === "length" ? "truncated at the length limit" : record.finish_reason === "stop" ? "ended by itself" : "";
    const about = [`sample ${sample.id}`, record.step !== undefined && `step ${record.step}`, record.num_tokens !== undefined && `${format(record.num_tokens)} tokens`, ended, record.failure && `failed: ${record.failure}`, this.stragglers.has(sample.id) && "straggler of its round", record.fate && `fate: ${record.fate}`, record.source].filter(Boolean);
    const tokens = element("pre", { id: "sample-tokens" }), legend = element("span", { className: "muted small" });
    const nav = element("div", { className: "segments" }, element("button", { type: "button", title: "arrow left", ariaLabel: "previous sample", onclick: () => this.step(-1) }, "← previous"), element("button", { type: "button", title: "arrow right", ariaLabel: "next sample", onclick: () => this.step(1) }, "next →"));
    this.pane.replaceChildren(
      element("div", { className: "controls", style: { margin: "0" } }, element("h2", { id: "sample-title" }, `Prompt ${group.name}`), element("span", { className: "space" }), nav),
      element("pre", { id: "sample-prompt" }, record.prompt || group.prompt || ""),
      ...(columns.length ? [part("Row of the data", facts(columns))] : []),
      ...(group.rows.length > 1 ? [part(`${group.rows.length} samples of this prompt`, element("div", { className: "members" }, ...group.rows.map((row) => element("button", { type: "button", ariaCurrent: String(row.id === sample.id), title: row.id, onclick: () => this.open(row.id) }, rewardDot(row), ` ${format(row.reward)}`, row.advantage === null || row.advantage === undefined ? "" : element("span", { className: "muted" }, `  ${row.advantage >= 0 ? "+" : ""}${format(+row.advantage.toPrecision(2))}`)))))] : []),
      element("div", { className: "part" }, element("div", { className: "controls", style: { "margin-bottom": "0.3rem" } }, element("span", { className: "muted small", id: "sample-about" }, about.join(" · ")), element("span", { className: "space" }), ...(sample.tokens ? [segments("colour of tokens", [["version", "by version"], ["logprob", "by log-prob"], ["none", "plain"]], this.colour, (value) => { this.colour = value; drawTokens(sample, value, tokens, legend); })] : [])), tokens, legend),
      ...(sample.note ? [element("p", { className: "muted small", id: "sample-note" }, sample.note)] : []),
      ...(rewards.length ? [part("Rewards", facts(rewards))] : []),
      ...(sample.requests.length ? [part("Requests", table(["engine", "from s", "to s", "had tokens", "has tokens", "ended"], sample.requests.map((each) => [each.engine, +each.start_s.toFixed(3), +each.end_s.toFixed(3), each.had, each.num_tokens, OUTCOMES[each.outcome]?.[1] || each.outcome])))] : []),
    );
    drawTokens(sample, this.colour, tokens, legend);
  }
}

/** A square in the colour of a reward: from red at 0 to green at 1. */
function rewardDot(row) {
  if (row.reward === null || row.reward === undefined) return element("i", { title: row.failure || "no reward", style: { "border-color": "var(--muted)" } });
  const share = Math.max(0, Math.min(1, row.reward));
  return element("i", { title: `${row.id}: ${format(row.reward)}`, style: { background: `color-mix(in srgb, var(--green) ${100 * share}%, var(--red))`, opacity: row.finish_reason === "length" ? 0.55 : 1 } });
}

const VERSION_COLOURS = ["blue", "amber", "teal", "red", "indigo"];
const versionColour = (number) => withAlpha(`var(--${VERSION_COLOURS[number % VERSION_COLOURS.length]})`, 0.2);
// Clear: certain. Full red: the token had a probability of exp(-6) or less.
const logprobColour = (logprob) => withAlpha("var(--red)", Math.min(6, Math.max(0, -logprob)) / 6 * 0.75);

function drawTokens(sample, by, place, legend) {
  const { tokens, spans, record } = sample, versions = spans.flatMap(([name, number]) => Array(number).fill(name)), names = [...new Set(versions)];
  const item = (paint, text) => element("span", {}, key(paint), text, "   ");
  legend.replaceChildren();
  if (!tokens || by !== "logprob") {
    if (names.length && by !== "none") legend.replaceChildren(...spans.map(([name, number]) => item(versionColour(names.indexOf(name)), `version ${name}: ${format(number)} tokens`)));
  } else {
    legend.replaceChildren(item(logprobColour(0), "log-prob 0"), item(logprobColour(-3), "−3"), item(logprobColour(-6), "−6 and less"));
  }
  if (!tokens || by === "none") { place.textContent = record.text || ""; return; }
  place.replaceChildren(...tokens.texts.map((text, i) => element("span", { title: `version ${versions[i]}, log-prob ${tokens.logprobs[i]}`, style: { background: by === "version" ? versionColour(names.indexOf(versions[i])) : logprobColour(tokens.logprobs[i]) } }, text)));
}
