"use strict";
// Charts of figures over steps, samples, seconds or cost, drawn by uPlot.

const AXES = { step: "optimizer steps", samples: "samples trained", seconds: "seconds", cost: "cost" };
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
/** Steps of an axis that counts. */
const WHOLE = Array.from({ length: 28 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
const SERIES_COLOURS = ["blue", "teal", "amber", "red"];

/** The mean of the points before, with weights that fall by `smoothing` from point to point. */
function smoothed(values, smoothing) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + value;
    weight = smoothing * weight + 1;
    return sum / weight;
  });
}

/** Figures that are the least or the largest of something: a mean of them is neither. */
const EXTREME = /(^|[/_])(min|max)(_|$)/;

/** x, mean, lowest and highest value of a figure of a run, and its smoothed mean; null if it has none. */
function curveOf(run, name, axis, smoothing) {
  const { figures } = run, points = figures.y[name];
  if (!points || !points[0] || !figures.x[axis]) return null;
  const kept = points[0].map((value, at) => (value === null ? -1 : at)).filter((at) => at >= 0);
  if (!kept.length) return null;
  const [mean, low, high] = [points[0], points[1] || points[0], points[2] || points[0]].map((each) => kept.map((at) => each[at]));
  return [kept.map((at) => figures.x[axis][at]), mean, low, high, smoothed(mean, EXTREME.test(name) ? 0 : smoothing)];
}

/** How the held-out prompts of a run are completed; training always samples. */
const sampling = (run) => ({ true: ", greedy", false: ", sampled" })[run.figures.config["run.eval_greedy"]] || "";

/** The mean reward or loss on held-out prompts of a run, with the interval of the reward. */
function evaluationCurve(run, axis, name) {
  const found = run.figures.evaluations.filter((each) => each[name] !== undefined && each[name] !== null);
  if (!found.length || found[0][axis] === undefined) return null;
  return [found.map((each) => each[axis]), ...[name, "low", "high", name].map((key) => found.map((each) => each[key] ?? null))];
}

/** The unit and meaning of a figure, for a pointer. */
function meaningOf(runs, name) {
  const [unit, meaning] = runs.map((run) => run.figures?.meanings[name]).find(Boolean) || ["", ""];
  return [name, unit && `unit: ${unit}`, meaning].filter(Boolean).join("\n");
}

class Chart {
  #plot = null;
  #shown = "";

  /** `spec`: title, unit, and series of [figure, label]; a figure "eval/…" is one of the evaluations. */
  constructor(spec) {
    this.spec = spec;
    this.legend = element("div", { className: "legend" });
    this.body = element("div");
    const csv = element("button", { className: "csv", type: "button", title: "download the curves", onclick: () => this.#download() }, "CSV");
    this.card = element("div", { className: `card chart ${spec.wide ? "wide" : ""}`, hidden: true },
      element("header", {}, element("h3", {}, spec.title, element("span", { className: "muted small" }, spec.unit ? `  ${spec.unit}` : "")), csv), this.legend, this.body);
    this.card.dataset.title = spec.title;
  }

  draw(runs, axis, smoothing) {
    this.lines = [];
    this.axis = axis;
    this.card.querySelector("h3").title = [...new Set(this.spec.series.map(([name]) => meaningOf(runs, name)))].join("\n\n");
    for (const run of runs) {
      this.spec.series.forEach(([name, label], number) => {
        const isEval = name.startsWith("eval/"), data = isEval ? evaluationCurve(run, axis, name.slice(5)) : curveOf(run, name, axis, smoothing);
        if (!data || (number && !isEval && data[3].every((value) => value === 0))) return; // a part that the run does not have
        const paint = runs.length > 1 || run.number > 0 ? runColour(run.number) : colour(SERIES_COLOURS[number]);
        this.lines.push({ run, name, label, data, paint, dash: runs.length > 1 ? DASHES[number] : [], text: `${runs.length > 1 ? `${run.figures.name} ` : ""}${runs.length > 1 && this.spec.series.length === 1 ? "" : label}${name === "eval/reward" ? sampling(run) : ""}`.trim() });
      });
    }
    // A simulation has no loss: its curves are zero.
    this.card.hidden = this.lines.every((line) => line.name !== "reward" && line.data[3].every((value) => value === 0) && line.data[2].every((value) => value === 0));
    if (this.card.hidden) return;
    const data = uPlot.join(this.lines.map((line) => line.data));
    const shown = JSON.stringify([axis, smoothing > 0, this.lines.map((line) => [line.run.number, line.name, line.paint]), this.body.clientWidth]);
    if (this.#plot && shown === this.#shown) {
      // A reader who has zoomed in stays there.
      const { min, max } = this.#plot.scales.x, [before] = this.#plot.data, isZoomed = min > before[0] || max < before.at(-1);
      this.#plot.setData(data, !isZoomed);
      if (isZoomed) this.#plot.redraw();
    } else {
      this.#plot?.destroy();
      this.#plot = new uPlot(this.#options(axis, smoothing > 0), data, this.body);
      this.#shown = shown;
    }
    this.#describe(null);
  }

  #options(axis, isSmoothed) {
    const series = [{}], bands = [];
    for (const line of this.lines) {
      const isEval = line.name.startsWith("eval/"), at = series.length;
      series.push({ label: line.text, stroke: isSmoothed && !isEval ? withAlpha(line.paint, 0.3) : line.paint, width: isSmoothed && !isEval ? 1 : 1.75, dash: isEval ? [4, 4] : line.dash, spanGaps: true,
        points: { show: isEval || line.data[0].length < 2, size: 7, fill: line.paint, stroke: line.paint } });
      // A filled band is an interval of confidence; the range of the steps at a point has thin lines.
      for (let i = 0; i < 2; i++) series.push({ stroke: isEval || line.data[1] === line.data[2] ? "transparent" : withAlpha(line.paint, 0.3), width: 0.7, spanGaps: true, points: { show: false } });
      series.push({ stroke: isSmoothed && !isEval ? line.paint : "transparent", width: 1.75, dash: line.dash, spanGaps: true, points: { show: false } });
      if (isEval) bands.push({ series: [at + 2, at + 1], fill: withAlpha(line.paint, 0.12) });
    }
    const line = { stroke: colour("line"), width: 1 }, font = "11px system-ui, sans-serif";
    return {
      width: Math.max(200, this.body.clientWidth), height: this.spec.height || 190, series, bands, padding: [8, 20, 0, 0],
      cursor: { sync: { key: "figures", scales: ["x", null] }, points: { size: 6 }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => this.#range(low, high) } },
      axes: [
        { stroke: colour("muted"), grid: { show: false }, ticks: line, font, size: 28, space: axis === "seconds" ? 90 : 60, incrs: ["step", "samples"].includes(axis) ? WHOLE : undefined, values: (_, values) => values.map(axis === "seconds" ? (value) => duration(value) : compact), label: undefined },
        { stroke: colour("muted"), grid: line, ticks: { show: false }, font, size: 46, space: 34, values: (_, values) => values.map(compact) },
      ],
      hooks: { setCursor: [(plot) => this.#describe(plot.cursor.left >= 0 ? plot.cursor.idx : null)] },
      axisName: AXES[axis],
    };
  }

  #range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.spec.share) return [Math.min(0, low), Math.max(high <= 1 && high > 0.5 ? 1 : high * 1.1, 1e-6)];
    if (high - low <= 1e-6 * Math.abs(high)) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const room = 0.06 * (high - low);
    return [low >= 0 && low < 0.5 * high ? 0 : low - room, high + room];
  }

  /** The values at the pointer, or the last ones. */
  #describe(at) {
    const data = this.#plot?.data || [];
    const xs = data[0] || [], place = xs.length ? xs[at === null ? xs.length - 1 : at] : undefined;
    const where = place === undefined ? "" : this.axis === "seconds" ? duration(place) : `${{ step: "step", samples: "sample", cost: "cost" }[this.axis]} ${format(place)}`;
    this.legend.replaceChildren(element("span", { className: "at" }, where), ...this.lines.map((line, number) => {
      const values = data[1 + 4 * number] || [];
      let i = at === null ? values.length - 1 : at;
      while (i > 0 && (values[i] === null || values[i] === undefined)) i--;
      return element("span", { title: meaningOf([line.run], line.name) }, key(line.paint, line.name.startsWith("eval/") || line.dash.length ? "line dashed" : "line"), `${line.text} `, element("b", {}, format(values[i])));
    }));
  }

  #download() {
    const rows = [["run", "figure", "x", "mean", "lowest", "highest"], ...this.lines.flatMap(({ run, name, data }) => data[0].map((x, i) => [JSON.stringify(run.figures.name), name, x, ...data.slice(1, 4).map((each) => each[i])]))];
    const url = URL.createObjectURL(new Blob([rows.map((row) => row.join(",")).join("\n")], { type: "text/csv" }));
    element("a", { href: url, download: `${this.spec.title.replaceAll(" ", "-")}.csv` }).click();
    URL.revokeObjectURL(url);
  }

  get plot() { return this.#plot; }
}

const withAlpha = (paint, alpha) => `color-mix(in srgb, ${paint} ${100 * alpha}%, transparent)`;

/** A number for an axis: "12k", "3M", "1e-6". */
function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(5));
}

/** A small line without axes. */
function sparkline(canvas, values, paint) {
  const width = canvas.clientWidth, all = values.filter((value) => value !== null), each = Math.ceil(all.length / 36) || 1;
  const known = Array.from({ length: Math.ceil(all.length / each) }, (_, at) => all.slice(at * each, (at + 1) * each)).map((part) => part.reduce((sum, value) => sum + value, 0) / part.length);
  const context = canvasOf(canvas, width, 26), low = Math.min(...known), high = Math.max(...known);
  if (known.length < 2 || !width) return;
  context.strokeStyle = paint;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  known.forEach((value, at) => context.lineTo(1 + at / (known.length - 1) * (width - 2), 24 - (high > low ? (value - low) / (high - low) : 0.5) * 22));
  context.stroke();
}
