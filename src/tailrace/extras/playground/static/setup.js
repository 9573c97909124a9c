"use strict";
// The set-up: a preset, what its sliders say, and the schedules; the address carries all three.

const DEFAULT_PRESET = "tail", MAX_SCHEDULES = 4, MAX_LINES = 20000;
const DEVICES = "sim.cluster.devices", ROLLOUT = "sim.cluster.rollout_devices", WIDTH = "sim.cluster.tensor_parallel";
const steps = (from, to, by) => Array.from({ length: Math.floor((to - from) / by + 1e-9) + 1 }, (_, at) => +(from + at * by).toFixed(6));

/** A slider: key of the config, what it is called, its unit and its values. */
const SLIDERS = [
  ["sim.lengths.median_tokens", "Median length", "tokens", [...steps(100, 1000, 100), ...steps(1250, 4000, 250), ...steps(4500, 12000, 500)]],
  ["sim.lengths.sigma", "Tail", "", steps(0, 2, 0.1)],
  [DEVICES, "Devices", "", [...steps(2, 32, 1), ...steps(40, 128, 8)]],
  [ROLLOUT, "of them generate", "", steps(1, 128, 1)],
  ["run.group_size", "Samples of a group", "", steps(2, 16, 1)],
  ["sim.rewards.median_s", "A reward takes", "s", [0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30]],
  ["schedule.staleness", "Largest lag", "steps", steps(0, 8, 1)],
];

class SetUp {
  /** `presets`: {name: {title, note, config, values, schedules}} of presets.json; `schedules`: their sources by name; `standard`: those that the first preset shows. */
  constructor(presets, schedules, standard) { Object.assign(this, { presets, schedules, standard }); this.choose(DEFAULT_PRESET); this.lines = {}; }

  choose(preset) { this.preset = preset; this.values = { ...this.of.values }; this.names = [...this.usual]; }
  /** The schedules of the preset: an address need not name them. */
  get usual() { return this.preset === DEFAULT_PRESET ? this.standard : this.of.schedules; }
  get of() { return this.presets[this.preset]; }
  get title() { return this.of.title; }

  /** The sliders that this preset has, each with its values. */
  get sliders() {
    const width = this.values[WIDTH] || 1, devices = this.values[DEVICES];
    return SLIDERS.filter(([key]) => key in this.of.values).map(([key, label, unit, values]) => {
      const own = [...new Set([...values, this.of.values[key]])].sort((one, other) => one - other);
      const fits = (each) => (key !== ROLLOUT && key !== DEVICES) || (each % width === 0 && (key !== ROLLOUT || each <= devices));
      return { key, label, unit, values: own.filter(fits) };
    });
  }

  set(key, value) {
    this.values[key] = value;
    if (key === DEVICES) this.values[ROLLOUT] = Math.min(this.values[ROLLOUT], value);
  }

  /** A value in words. */
  said(key, unit) {
    const value = this.values[key];
    if (key === "sim.lengths.sigma") return value ? `longest ${format(Math.round(Math.exp(value * 2.8)))} ×` : "all equal";
    if (key === ROLLOUT && value === this.values[DEVICES]) return "all, in turn";
    return `${format(value)} ${unit}`.trim();
  }

  /** What the simulator is asked about a schedule. `lines`: null, or the reader's own. */
  question(schedule, lines) {
    const settings = {};
    for (const [key, value] of Object.entries(this.values)) if (value !== this.of.values[key]) settings[key] = value;
    if (ROLLOUT in this.of.values) {
      const inTurn = this.values[ROLLOUT] === this.values[DEVICES];
      settings["placement.kind"] = inTurn ? "colocated" : "disaggregated";
      settings[ROLLOUT] = inTurn ? null : this.values[ROLLOUT];
    }
    return { config: this.of.config, settings, schedule, lines };
  }

  get address() {
    const words = new URLSearchParams();
    if (this.preset !== DEFAULT_PRESET) words.set("preset", this.preset);
    if (this.names.join() !== this.usual.join()) words.set("schedules", this.names.join());
    for (const [key, value] of Object.entries(this.values)) if (value !== this.of.values[key]) words.set(key, value);
    for (const [name, lines] of Object.entries(this.lines)) if (this.names.includes(name)) words.set(`lines.${name}`, lines);
    return words.toString();
  }

  /** Take a set-up from an address. Throws an Error that says what is wrong with it; then nothing has changed. */
  read(address) {
    const read = new SetUp(this.presets, this.schedules, this.standard), broken = (why) => { throw new Error(`This link is broken: ${why}. The page shows its own set-up.`); };
    for (const [key, text] of new URLSearchParams(address)) {
      if (key === "preset") { if (!Object.hasOwn(this.presets, text)) broken(`there is no preset ${short(text)}`); read.choose(text); }
    }
    for (const [key, text] of new URLSearchParams(address)) {
      if (key === "preset") continue;
      if (key === "schedules") {
        read.names = text.split(",");
        const unknown = read.names.find((name) => !Object.hasOwn(this.schedules, name));
        if (unknown !== undefined) broken(`there is no schedule ${short(unknown)}`);
        if (read.names.length > MAX_SCHEDULES || new Set(read.names).size < read.names.length) broken(`it has more than ${MAX_SCHEDULES} schedules, or one twice`);
      } else if (key.startsWith("lines.") && Object.hasOwn(this.schedules, key.slice(6))) {
        if (text.length > MAX_LINES) broken(`its lines are longer than ${MAX_LINES} characters`);
        read.lines[key.slice(6)] = text;
      } else {
        const slider = SLIDERS.find(([each]) => each === key && key in read.of.values), value = Number(text);
        if (!slider) broken(`there is no setting ${short(key)}`);
        const values = slider[3];
        if (text.trim() === "" || !(value >= values[0] && value <= values.at(-1))) broken(`${key} = ${short(text)} is not from ${values[0]} to ${values.at(-1)}`);
        read.values[key] = value;
      }
    }
    if (read.values[ROLLOUT] > read.values[DEVICES]) broken(`more devices generate than there are`);
    Object.assign(this, { preset: read.preset, values: read.values, names: read.names, lines: read.lines });
  }
}

const short = (text) => JSON.stringify(text.slice(0, 40));
