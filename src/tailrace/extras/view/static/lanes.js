"use strict";
// The lanes of a run on a canvas: a window of the timeline, as `Lanes.window` in lanes.py gives it.

const OUTCOMES = {
  stop: ["blue", "ended"], length: ["indigo", "ended at the length limit"], cancelled: ["amber", "aborted"], moved: ["amber", "moved"],
  evicted: ["amber", "given back by the engine"], refused: ["amber", "refused"], unfinished: ["teal", "not ended"], evaluation: ["cause-evaluation", "held-out prompt"],
};
const LANE_GAP = 10, STRIP = 9, RULER = 26, ROUNDS = 16, TRAINER = 30, MARKS = 14;

/** Decode what is base64, once. */
function decoded(data) {
  for (const lane of data.lanes) {
    for (const kind of ["shares", "slots_used", "range"]) {
      if (lane[kind]) lane[kind] = Object.fromEntries(Object.entries(lane[kind]).map(([cause, text]) => [cause, typeof text === "string" ? bytesOf(text) : text]));
    }
  }
  return data;
}

/** Where each lane stands: name, top, height, the height of its strip of causes and of the slots below. */
function placesOf(data, isDense, marks) {
  const engines = data.lanes.filter((lane) => "slots" in lane).length, places = [];
  let top = RULER;
  if (data.rounds.length) { places.push({ name: "rounds", top, height: ROUNDS, slots: 0 }); top += ROUNDS + LANE_GAP / 2; }
  if (marks.length) { places.push({ name: "advisories", top, height: MARKS, slots: 0 }); top += MARKS + LANE_GAP / 2; }
  for (const lane of data.lanes) {
    const isEngine = "slots" in lane;
    const slots = !isEngine ? 0 : isDense ? 22 : engines > 16 ? 18 : engines > 6 ? 34 : Math.max(44, Math.min(150, 4.5 * lane.slots));
    const strip = isEngine && lane.pieces?.length !== 0 ? STRIP : 0; // causes: a simulation has none
    const height = lane.name === "trainer" ? (isDense ? 22 : TRAINER) : isEngine ? strip + slots : MARKS;
    places.push({ name: lane.name, lane, top, height, slots, strip });
    top += height + (lane.name === "trainer" || strip ? LANE_GAP : LANE_GAP / 2);
  }
  return { places, height: top };
}

class LanesPicture {
  constructor(canvas) { this.canvas = canvas; }

  /** Draw a window so that `from` to `to` fill the canvas; the window may be of another range. */
  draw(data, from, to, { isDense = false, lives = [], marks = [] } = {}) {
    Object.assign(this, { data, from, to, marks });
    const width = this.canvas.clientWidth, { places, height } = placesOf(data, isDense, marks);
    this.left = width < 600 ? 0 : 118;
    this.width = width - this.left;
    this.places = places;
    const context = this.context = canvasOf(this.canvas, width, height);
    this.drawn = { requests: 0, bins: 0, pieces: 0 };
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.width, height);
    context.clip();
    this.#ruler(height);
    for (const place of places) this.#place(place);
    context.fillStyle = colour("red");
    for (const start of lives.slice(1)) context.fillRect(this.x(start), RULER, 1.5, height);
    context.restore();
    this.#names();
  }

  get unit() { return unitOf(this.to - this.from); }
  x(time) { return this.left + (time - this.from) / (this.to - this.from) * this.width; }
  time(x) { return this.from + (x - this.left) / this.width * (this.to - this.from); }

  #ruler(height) {
    const { context, from, to } = this, rough = (to - from) / (this.width / 95), power = 10 ** Math.floor(Math.log10(rough));
    const units = to - from > 300 ? [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400] : [];
    const step = [...units, ...[1, 2, 5, 10].map((each) => each * power)].find((each) => each >= rough);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = Math.round(this.x(tick)) + 0.5;
      context.fillStyle = colour("line");
      context.fillRect(x, RULER - 6, 1, height);
      context.fillStyle = colour("muted");
      context.fillText(duration(tick, Math.min(60, step)), x + 4, RULER / 2 - 2);
    }
  }

  #place(place) {
    const { context, data } = this, { lane, top, height } = place;
    if (place.name === "rounds") {
      const most = Math.max(...data.rounds.map(([, start, end]) => this.x(end) - this.x(start))), every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((each) => each * most > 46) || 1;
      for (const [round, start, end] of data.rounds) {
        const left = this.x(start), width = this.x(end) - left;
        context.fillStyle = colour(round % 2 ? "between" : "untrained");
        context.fillRect(left, top, Math.max(1, width), height);
      }
      context.fillStyle = colour("ink");
      for (const [round, start, end] of data.rounds) {
        const width = this.x(end) - this.x(start);
        if ((round + 1) % every === 0 || width > 26) context.fillText(width > 64 ? `round ${round + 1}` : String(round + 1), this.x(start) + (width > 26 ? 5 : 1), top + height / 2 + 1);
      }
      return;
    }
    if (place.name === "advisories") {
      context.fillStyle = colour("amber");
      for (const { time_s } of this.marks) { context.fillRect(this.x(time_s), top, 1, this.canvas.clientHeight); context.fillRect(this.x(time_s) - 3, top, 7, height); }
      return;
    }
    if ("slots" in lane) {
      context.fillStyle = colour("between");
      context.globalAlpha = 0.55;
      context.fillRect(this.left, top + place.strip, this.width, place.slots);
      context.globalAlpha = 1;
    }
    const strip = "slots" in lane ? place.strip : height;
    if (lane.pieces) this.#pieces(lane.pieces, top, strip); else this.#shares(lane.shares, top, strip);
    if (lane.requests) this.#requests(lane, top + place.strip, place.slots);
    else if (lane.slots_used) { this.#shares(lane.slots_used, top + place.strip, place.slots); this.#range(lane.range, top + place.strip, place.slots); }
    if (lane.name === "stragglers") this.#stragglers(top, height);
    for (const [time, engine, state] of data.states) {
      if (engine !== lane.name) continue;
      context.fillStyle = colour(state === "dead" ? "ink" : state === "asleep" ? "cause-lent" : "green");
      context.fillRect(this.x(time) - 1, top, 2, height);
    }
  }

  #pieces(pieces, top, height) {
    for (const [start, end, cause] of pieces) {
      const left = this.x(start), width = this.x(end) - left;
      if (left + width < this.left || left > this.left + this.width) continue;
      this.context.fillStyle = causeColour(cause);
      this.context.fillRect(left, top, Math.max(0.7, width > 4 ? width - 0.5 : width), height);
      this.drawn.pieces++;
    }
  }

  /** Shares of causes in bins, one upon the other from the bottom. */
  #shares(shares, top, height) {
    const { context, data } = this, entries = Object.entries(shares);
    if (!entries.length) return;
    const { edges } = data, bins = entries[0][1].length, filled = new Float32Array(bins);
    for (const [cause, bytes] of entries) {
      context.fillStyle = causeColour(cause);
      for (let i = 0; i < bins; i++) {
        if (!bytes[i] || edges[i + 1] < this.from || edges[i] > this.to) continue;
        const part = bytes[i] / 255 * height, left = Math.round(this.x(edges[i])), right = Math.round(this.x(edges[i + 1]));
        context.fillRect(left, top + height - filled[i] - part, Math.max(1, right - left), part);
        filled[i] += part;
        this.drawn.bins++;
      }
    }
  }

  /** From the least to the largest occupancy within each bar, over its mean. */
  #range({ low, high }, top, height) {
    const { context, data: { edges } } = this;
    context.fillStyle = colour("ink");
    for (let i = 0; i < low.length; i++) {
      if (edges[i + 1] < this.from || edges[i] > this.to) continue;
      const middle = (this.x(edges[i]) + this.x(edges[i + 1])) / 2, span = (high[i] - low[i]) / 255 * height;
      context.globalAlpha = 0.28;
      context.fillRect(middle - 0.5, top + height - high[i] / 255 * height, 1, span);
    }
    context.globalAlpha = 1;
  }

  #requests(lane, top, height) {
    const { context } = this, slot = height / Math.max(1, lane.slots);
    for (const [start, end, row, outcome] of lane.requests) {
      const left = this.x(start), width = this.x(end) - left;
      context.fillStyle = colour((OUTCOMES[outcome] || OUTCOMES.unfinished)[0]);
      context.fillRect(left, top + row * slot, Math.max(0.7, width - 0.6), slot > 3 ? slot - 0.8 : slot);
      this.drawn.requests++;
    }
  }

  #stragglers(top, height) {
    this.context.fillStyle = colour("red");
    for (const each of this.data.stragglers.slice(0, 60)) {
      const left = this.x(each.start_s), width = this.x(each.end_s) - left;
      this.context.fillRect(left, top, Math.max(1, width), height);
    }
  }

  #names() {
    const { context } = this;
    context.textBaseline = "middle";
    for (const place of this.places) {
      const isMark = !place.slots && place.name !== "trainer", middle = place.top + place.height / 2;
      context.font = `${isMark ? 11 : 12}px system-ui, sans-serif`;
      if (this.left) {
        context.fillStyle = colour(isMark ? "muted" : "ink");
        context.textAlign = "right";
        context.fillText(place.name, this.left - 12, middle + (isMark ? 1 : 0));
        context.textAlign = "left";
      } else if (place.name !== "rounds") {
        const width = context.measureText(place.name).width, high = isMark ? place.height : 16, top = place.top + (place.slots ? place.strip + 2 : isMark ? 0 : 2);
        context.fillStyle = colour("paper");
        context.globalAlpha = 0.85;
        context.fillRect(4, top, width + 8, high);
        context.globalAlpha = 1;
        context.fillStyle = colour(isMark ? "muted" : "ink");
        context.fillText(place.name, 8, top + high / 2 + 1);
      }
    }
  }

  /** What is under a point: {text, sample, round}. */
  at(x, y) {
    const place = this.places?.find((each) => y >= each.top && y < each.top + each.height);
    if (!place || x < this.left) return null;
    const time = this.time(x), { lane } = place, is = ([start, end]) => start <= time && time <= end;
    if (place.name === "rounds") {
      const found = this.data.rounds.find(([, start, end]) => start <= time && time <= end);
      return found && { text: `${found[3] > found[0] ? `rounds ${found[0] + 1} to ${found[3] + 1}` : `round ${found[0] + 1}`}: ${duration(found[2] - found[1])}\nclick to zoom`, round: found };
    }
    const near = 3 * (this.to - this.from) / this.width;
    if (place.name === "advisories") {
      const found = this.marks.filter((each) => Math.abs(each.time_s - time) <= 2 * near);
      return found.length ? { text: found.map((each) => `${each.kind}, since ${duration(each.time_s)}: ${each.text}`).join("\n\n") } : null;
    }
    const straggler = place.name === "stragglers" && this.data.stragglers.find((each) => each.start_s - near <= time && time <= each.end_s + near);
    if (straggler) return { sample: straggler.sample, text: `round ${straggler.round + 1}: ${straggler.sample} ended last,\n${duration(straggler.end_s - straggler.start_s)} after the one before it\n${format(straggler.tokens)} tokens on ${straggler.engine}` };
    if (lane.requests && y >= place.top + place.strip) {
      const row = (y - place.top - place.strip) / place.slots * Math.max(1, lane.slots);
      const found = lane.requests.find((each) => is(each) && each[2] <= row && row < each[2] + 1);
      if (found) return { sample: found[4], text: `${found[4]} on ${lane.name}: ${OUTCOMES[found[3]]?.[1] || found[3]}\n${duration(found[0], this.unit)} to ${duration(found[1], this.unit)}, ${format(found[5])} to ${format(found[6])} tokens` };
    }
    const causes = (name) => CAUSES[name] || name;
    if (lane.pieces) {
      const found = lane.pieces.find(is);
      return found && { text: `${place.name}: ${causes(found[2])}, ${duration(found[1] - found[0])}` };
    }
    const { edges } = this.data, bin = Math.max(0, edges.findLastIndex((edge, at) => edge <= time && at < edges.length - 1));
    const parts = Object.entries(lane.shares).filter(([, bytes]) => bytes[bin] > 2).sort((one, other) => other[1][bin] - one[1][bin]);
    const used = lane.slots_used && Object.values(lane.slots_used).reduce((sum, bytes) => sum + bytes[bin] / 255, 0);
    return { text: [`${place.name}, ${duration(edges[bin + 1] - edges[bin])} from ${duration(edges[bin], this.unit)}`, ...parts.map(([cause, bytes]) => `${percent(bytes[bin] / 255)} ${causes(cause)}`), ...(used === undefined ? [] : [`${percent(used)} of ${lane.slots} slots in use, ${percent(lane.range.low[bin] / 255)} to ${percent(lane.range.high[bin] / 255)} within this bar`])].join("\n") };
  }
}
