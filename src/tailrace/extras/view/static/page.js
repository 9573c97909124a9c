"use strict";
// The page of `tailrace view`. The server gives it what Python has read out of the files; this script draws it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const isServed = !data.runs;
  const POLL_MS = 2000, NUM_DRAWN_AT_FIRST = 3, MAX_POINTS = 4000, MAX_TABLE_ROWS = 100;
  // Okabe and Ito's colours, which people with any colour vision can tell apart.
  const RUN_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"];
  const CAUSES = {
    tail: ["#d55e00", "waits for the rollout's tail"], generation: ["#f5c6a5", "waits for generation"],
    weights: ["#cc79a7", "waits for weights"], rewards: ["#f0e442", "waits for rewards"],
    publication: ["#7b5ea7", "publication"], evaluation: ["#a6cee3", "evaluation"],
    lent: ["#999999", "lent"], dead: ["#000000", "dead"], unknown: ["#dddddd", "nothing else recorded"],
  };
  const OUTCOMES = {
    stop: ["#0072b2", "ended"], length: ["#56b4e9", "length limit"], cancelled: ["#e69f00", "aborted"],
    evicted: ["#a0522d", "given back by an engine"], unfinished: ["#009e73", "not ended"],
    evaluation: ["#b0c4de", "held-out prompt"],
  };
  const FIXED_ROWS = ["rounds", "trainer", "publications", "probes", "rewards"];
  const ON_RUN_LANES = { yaxis: "y3" };
  const PLOT = { displaylogo: false, responsive: true };
  const BUTTONS = { orientation: "v" };  // in the right margin, beside titles and curves
  const FONT = { family: "system-ui, sans-serif", size: 12 };

  const runs = Array.from({ length: data.num_runs }, (_, number) => ({
    number, etag: "", payload: null, key: "", engines: [], index: new Map(),
  }));
  window.tailrace = { runs, draws: 0 };
  const byId = (id) => document.getElementById(id);

  function element(tag, text, attributes) {
    const made = Object.assign(document.createElement(tag), attributes || {});
    if (text !== undefined && text !== null) made.textContent = text;
    return made;
  }

  // ---- data ----

  function take(run, payload) {
    run.payload = payload;
    const newest = payload.samples.at(-1);
    const key = JSON.stringify([payload.end_s, payload.rows.length, newest && newest.id, payload.defects,
      payload.state.kind, payload.advisories]);
    const isNew = key !== run.key;
    run.key = key;
    return isNew;
  }

  async function fetched(run) {
    const reply = await fetch(`runs/${run.number}`), etag = reply.headers.get("ETag");
    if (!reply.ok) throw new Error(await reply.text());
    if (etag === run.etag) return false;
    run.etag = etag;
    return take(run, await reply.json());
  }

  // ---- timeline ----

  function rowsOf(run) {
    const chosen = run.engines.length ? run.engines : run.payload.engines.map((engine) => engine.name);
    const first = new Map();
    let next = 0, head = 1;
    for (const engine of run.payload.engines) head = Math.max(head, Math.round(engine.slots / 12));
    for (const engine of run.payload.engines) {
      if (!chosen.includes(engine.name)) continue;
      // The idle times of an engine stand above its slots, in a bar as high as several of them.
      first.set(engine.name, next + head - 1);
      next += head + engine.slots;
    }
    return { first, count: Math.max(1, next), head };
  }

  class Segments {
    constructor(number) { this.x = new Float64Array(3 * number); this.y = new Float64Array(3 * number); this.n = 0; }
    add(start, end, row) {
      const at = 3 * this.n++;
      this.x[at] = start; this.x[at + 1] = end; this.x[at + 2] = NaN;
      this.y[at] = this.y[at + 1] = row; this.y[at + 2] = NaN;
    }
    trace(name, colour, more) {
      return { type: "scattergl", mode: "lines", name, x: this.x.subarray(0, 3 * this.n), y: this.y.subarray(0, 3 * this.n),
        line: { color: colour, width: 1 }, hoverinfo: "skip", meta: { spans: this.n, rows: 1 }, ...more };
    }
  }

  function requestTraces(run, rows) {
    const { requests, unfinished } = run.payload;
    const finished = requests.sample.length, number = finished + unfinished.sample.length;
    const by = {};
    run.index = new Map();
    for (let i = 0; i < number; i++) {
      const columns = i < finished ? requests : unfinished, at = i < finished ? i : i - finished;
      const first = rows.first.get(columns.engine[at]);
      if (first === undefined) continue;
      const row = first + columns.slot[at], outcome = columns.outcome[at] in OUTCOMES ? columns.outcome[at] : "unfinished";
      (by[outcome] ||= new Segments(number)).add(columns.start_s[at], columns.end_s[at], row);
      if (!run.index.has(row)) run.index.set(row, []);
      run.index.get(row).push(i);
    }
    return Object.keys(OUTCOMES).filter((name) => by[name]).map((name) => by[name].trace(OUTCOMES[name][1], OUTCOMES[name][0]));
  }

  function idleTraces(run, rows) {
    const [lanes, starts, ends, causes] = run.payload.idle_times, found = [];
    for (const [cause, [colour, name]] of Object.entries(CAUSES)) {
      const trainer = new Segments(lanes.length), engines = new Segments(lanes.length);
      lanes.forEach((lane, i) => {
        if (causes[i] !== cause) return;
        if (lane === "trainer") trainer.add(starts[i], ends[i], FIXED_ROWS.indexOf("trainer"));
        else if (rows.first.has(lane)) engines.add(starts[i], ends[i], rows.first.get(lane) - (rows.head - 1) / 2);
      });
      if (trainer.n) found.push(trainer.trace(name, colour, { ...ON_RUN_LANES, legendgroup: cause }));
      if (engines.n) found.push({ ...engines.trace(name, colour, { legendgroup: cause, showlegend: !trainer.n }), meta: { spans: engines.n, rows: rows.head } });
    }
    return found;
  }

  function runTraces(run) {
    const found = [], { rounds, passes, steps, publications, probes, rewards } = run.payload;
    const draw = (row, name, colour, works) => {
      const segments = new Segments(works.length);
      for (const [start, end] of works) segments.add(start, end, FIXED_ROWS.indexOf(row));
      if (segments.n) found.push(segments.trace(name, colour, { ...ON_RUN_LANES, showlegend: row === "trainer" }));
    };
    const times = rounds.map(([, start, end]) => [start, end]);
    draw("rounds", "round", "#444444", times.filter((_, i) => i % 2 === 0));
    draw("rounds", "round", "#aaaaaa", times.filter((_, i) => i % 2 === 1));
    draw("trainer", "gradients", "#66c2a5", passes);
    draw("trainer", "optimizer step", "#1b7f5a", steps);
    draw("publications", "publication", "#7b5ea7", publications);
    draw("probes", "weights arrived", "#1b7f5a", probes.filter(([, , cause]) => !cause));
    draw("probes", "weights not arrived", "#c00000", probes.filter(([, , cause]) => cause));
    draw("rewards", "rewards", "#b8a800", rewards);
    return found;
  }

  function markTraces(run, rows) {
    const shown = (engine) => rows.first.has(engine);
    const last = run.payload.stragglers.filter((each) => shown(each.engine));
    const states = run.payload.states.filter((each) => shown(each.engine));
    const marks = [];
    if (last.length) marks.push({ type: "scattergl", mode: "markers", name: "stragglers",
      x: last.map((each) => each.end_s), y: last.map((each) => rows.first.get(each.engine) + each.slot),
      text: last.map((each) => `${each.round}: ${each.sample} ended last, ${each.tokens} tokens,<br>${each.alone_s.toFixed(2)} s after the one before it`),
      hovertemplate: "%{text}<extra></extra>", marker: { color: "#c00000", symbol: "diamond", size: 9 } });
    if (states.length) marks.push({ type: "scattergl", mode: "markers", name: "engine states",
      x: states.map((each) => each.time_s), y: states.map((each) => rows.first.get(each.engine)),
      text: states.map((each) => `${each.engine} is ${each.state}<br>${each.why}`), hovertemplate: "%{text}<extra></extra>",
      marker: { color: states.map((each) => (each.state === "dead" ? "#000" : each.state === "asleep" ? "#999" : "#009e73")), symbol: "x", size: 8 } });
    return marks;
  }

  function lengthTraces(run, rows) {
    const { requests } = run.payload;
    return ["stop", "length"].map((outcome) => {
      const x = [], y = [], text = [];
      requests.outcome.forEach((each, i) => {
        if (each !== outcome || !rows.first.has(requests.engine[i])) return;
        x.push(requests.end_s[i]); y.push(requests.tokens[i]); text.push(requests.sample[i]);
      });
      return { type: "scattergl", mode: "markers", name: "lengths", x, y, text, yaxis: "y2", showlegend: false,
        marker: { size: 3, color: OUTCOMES[outcome][0] }, hovertemplate: "%{text}: %{y} tokens<extra></extra>" };
    });
  }

  function timelineLayout(run, rows) {
    const names = [...rows.first.keys()], every = Math.max(1, Math.ceil(names.length / 30));
    const shown = names.filter((_, i) => i % every === 0);
    const ends = byId("same-scale").checked ? runs.map((each) => (each.payload ? each.payload.end_s : 0)) : [];
    return {
      font: FONT, height: Math.min(950, 480 + 6 * rows.count), margin: { l: 110, r: 40, t: 10, b: 40 }, modebar: BUTTONS, dragmode: "zoom",
      hovermode: "closest", uirevision: `${run.engines.join() || "all"} ${ends.length}`, legend: { orientation: "h", y: -0.12 },
      xaxis: { title: { text: "seconds" }, anchor: "y2", ...(ends.length ? { range: [0, Math.max(1e-3, ...ends)] } : {}) },
      yaxis: { domain: [0.28, 0.82], range: [rows.count - 0.5, -0.5], showgrid: false, zeroline: false,
        tickvals: shown.map((name) => rows.first.get(name)), ticktext: shown },
      yaxis3: { domain: [0.85, 1], range: [FIXED_ROWS.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false,
        tickvals: [...FIXED_ROWS.keys()], ticktext: FIXED_ROWS },
      yaxis2: { domain: [0, 0.23], rangemode: "tozero", title: { text: "response, tokens" } },
      shapes: run.payload.lives.slice(1).map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", color: "#c00000" } })),
    };
  }

  function widthOf(trace, plot, layout, rows) {
    if (trace.yaxis === "y3") return 11;
    // The first draw has to know the height of a row before there are axes.
    const { yaxis } = plot._fullLayout || {}, visible = yaxis ? Math.abs(yaxis.range[0] - yaxis.range[1]) : rows.count;
    const height = (yaxis ? yaxis._length : 0.5 * layout.height) / visible;
    return Math.max(1, Math.min(14, 0.8 * height)) * trace.meta.rows;
  }

  async function drawTimeline(run) {
    const { plot, details } = run.parts;
    if (!details.open) return;
    const rows = rowsOf(run);
    const traces = [...runTraces(run), ...idleTraces(run, rows), ...requestTraces(run, rows), ...markTraces(run, rows), ...lengthTraces(run, rows)];
    const layout = timelineLayout(run, rows);
    for (const trace of traces) if (trace.line) trace.line.width = widthOf(trace, plot, layout, rows);
    await Plotly.react(plot, traces, layout, PLOT);
    if (!run.listens) {
      run.listens = true;
      plot.on("plotly_relayout", (change) => {
        if (!Object.keys(change).some((key) => key.startsWith("yaxis."))) return;
        const lines = plot.data.map((trace, i) => (trace.mode === "lines" ? i : -1)).filter((i) => i >= 0);
        Plotly.restyle(plot, { "line.width": lines.map((i) => widthOf(plot.data[i], plot)) }, lines);
      });
      if (!run.followsPointer) listenToPointer(run);
      run.followsPointer = true;
    }
    run.spans = plot.data.reduce((sum, trace) => sum + (trace.meta ? trace.meta.spans : 0), 0);
  }

  function requestAt(run, event) {
    const { plot } = run.parts;
    if (!plot._fullLayout) return null; // the run is closed
    const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
    const time = xaxis.p2d(event.clientX - box.left - xaxis._offset), row = Math.round(yaxis.p2d(event.clientY - box.top - yaxis._offset));
    const { requests, unfinished } = run.payload, finished = requests.sample.length;
    for (const i of run.index.get(row) || []) {
      const columns = i < finished ? requests : unfinished, at = i < finished ? i : i - finished;
      if (columns.start_s[at] <= time && time <= columns.end_s[at]) {
        return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[at]]));
      }
    }
    return null;
  }

  // Plotly looks for the nearest point of a line; here the span under the pointer is wanted.
  function listenToPointer(run) {
    const { plot, pointer } = run.parts;
    let down = null;
    plot.addEventListener("pointermove", (event) => {
      const found = requestAt(run, event);
      pointer.textContent = found ? describe(found) : "Click on a request to open its sample.";
    });
    plot.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; }, true);
    window.addEventListener("pointerup", (event) => {
      const isClick = down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 4;
      down = null;
      const found = isClick && requestAt(run, event);
      if (found && found.sample) openSample(run, found.sample);
    }, true);
  }

  const describe = (request) => `${request.sample} on ${request.engine}: ${request.start_s.toFixed(2)} to ${request.end_s.toFixed(2)} s, `
    + `${request.had} to ${request.tokens} tokens, ${(OUTCOMES[request.outcome] || ["", request.outcome])[1]}`;

  // ---- tables ----

  function fill(table, heads, rows, onOpen) {
    table.hidden = !rows.length;
    const head = element("tr");
    heads.forEach((text) => head.append(element("th", text)));
    table.replaceChildren(head, ...rows.map((cells) => {
      const row = element("tr");
      cells.forEach((cell) => row.append(element("td", typeof cell === "number" ? format(cell) : cell, { className: typeof cell === "number" ? "number" : "" })));
      if (onOpen) {
        row.className = "opens";
        row.tabIndex = 0;
        row.addEventListener("click", () => onOpen(cells));
        row.addEventListener("keydown", (event) => { if (event.key === "Enter") onOpen(cells); });
      }
      return row;
    }));
  }

  const format = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumFractionDigits: 3 }));

  function idleRows(run) {
    const chosen = run.engines.length ? run.engines : run.payload.engines.map((engine) => engine.name), sums = new Map();
    const rows = [];
    for (const each of run.payload.idle) {
      if (each.lane === "trainer") rows.push(["trainer", CAUSES[each.cause][1], each.seconds, `${(100 * each.share).toFixed(1)}%`]);
      else if (chosen.includes(each.lane)) sums.set(each.cause, [(sums.get(each.cause) || [0, 0])[0] + each.seconds, (sums.get(each.cause) || [0, 0])[1] + each.share]);
    }
    for (const [cause, [seconds, share]] of [...sums].sort((one, other) => other[1][0] - one[1][0])) {
      rows.push([chosen.length === 1 ? chosen[0] : "engines, mean", CAUSES[cause][1], seconds / chosen.length, `${(100 * share / chosen.length).toFixed(1)}%`]);
    }
    return rows;
  }

  function drawState(run) {
    const { state, doing } = run.payload, now = isServed ? "Now" : "When this page was written";
    run.parts.state.textContent = isServed || state.kind === "finished" ? state.text : `${state.text} (when this page was written)`;
    run.parts.doing.textContent = state.kind === "written" && doing.length ? `${now}: ${doing.join(" · ")}` : "";
  }

  function drawTexts(run) {
    const { payload, parts } = run;
    parts.title.textContent = payload.name;
    parts.cost.textContent = payload.cost && `Cost: ${payload.cost}`;
    parts.advisories.replaceChildren(
      ...payload.advisories.map((each) => element("div", `${each.kind}: ${each.text}`, { className: "advisory" })),
      ...payload.defects.map((each) => element("div",
        each.file + (each.line ? `, line ${each.line}` : "") + `: ${each.problem}` + (each.num_lines > 1 ? ` (and ${each.num_lines - 1} more lines)` : "") + ". The rest is shown.",
        { className: "defect" })),
    );
    const names = payload.engines.map((engine) => engine.name);
    if (parts.engines.options.length !== names.length) {
      parts.chooser.hidden = names.length < 2;
      parts.engines.replaceChildren(...names.map((name) => element("option", name, { value: name })));
    }
    fill(parts.idle, ["idle", "cause", "seconds", "share"], idleRows(run));
    const open = (cells) => openSample(run, cells[1]);
    fill(parts.stragglers, ["straggler of", "sample", "engine", "tokens", "seconds alone"],
      payload.stragglers.slice(-MAX_TABLE_ROWS).reverse().map((each) => [each.round, each.sample, each.engine, each.tokens, each.alone_s]), open);
    fill(parts.samples, ["step", "sample", "reward", "tokens", "ended", "tokens recorded"],
      payload.samples.slice(-MAX_TABLE_ROWS).reverse().map((each) => [each.step, each.id, each.reward, each.num_tokens, each.finish_reason, each.has_tokens ? "yes" : "no"]), open);
  }

  // ---- one sample ----

  let opened = null;

  async function openSample(run, id) {
    let sample;
    if (isServed) sample = await (await fetch(`runs/${run.number}/sample?id=${encodeURIComponent(id)}`)).json();
    else sample = data.samples[run.number][id] || { id, source: "", record: {}, spans: [], tokens: null, requests: [], note: "this file has only the newest samples in it" };
    opened = sample;
    byId("sample-title").textContent = `${run.payload.name}: sample ${id}`;
    byId("sample-note").textContent = [sample.source, sample.note].filter(Boolean).join("; ");
    byId("sample-prompt").textContent = sample.record.prompt || "";
    fill(byId("sample-requests"), ["engine", "from s", "to s", "had tokens", "has tokens", "ended"],
      sample.requests.map((each) => [each.engine, each.start_s, each.end_s, each.had, each.tokens, (OUTCOMES[each.outcome] || ["", each.outcome])[1]]));
    fill(byId("sample-record"), ["field", "value"], Object.entries(sample.record).filter(([name]) => !["prompt", "text", "spans"].includes(name))
      .map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]));
    drawTokens();
    if (!byId("sample").open) byId("sample").showModal();
  }

  const versionColour = (number) => `hsl(${(number * 67) % 360} 75% 86%)`;
  // White: certain. Red: the token had a probability of exp(-6) or less.
  const logprobColour = (logprob) => `rgb(255 ${Math.round(255 + 22 * Math.max(-6, logprob))} ${Math.round(255 + 26 * Math.max(-6, logprob))})`;

  function drawTokens() {
    const { tokens, spans, record } = opened, by = byId("colour").value;
    const versions = spans.flatMap(([name, number]) => Array(number).fill(name)), names = [...new Set(versions)];
    byId("colour-label").hidden = !tokens;
    const legend = by === "version" || !tokens
      ? spans.flatMap(([name, number]) => [key(versionColour(names.indexOf(name))), `version ${name}: ${format(number)} tokens`])
      : [key(logprobColour(0)), "log-prob 0", key(logprobColour(-3)), "-3", key(logprobColour(-6)), "-6 and less"];
    byId("sample-legend").replaceChildren(...legend);
    const place = byId("sample-tokens");
    if (!tokens) { place.textContent = record.text || ""; return; }
    place.replaceChildren(...tokens.texts.map((text, i) => {
      const made = element("span", text, { title: `version ${versions[i]}, log-prob ${tokens.logprobs[i]}` });
      made.style.background = by === "version" ? versionColour(names.indexOf(versions[i])) : logprobColour(tokens.logprobs[i]);
      return made;
    }));
  }

  function key(colour) {
    const made = element("span", "", { className: "key" });
    made.style.background = colour;
    return made;
  }

  // ---- figures over time ----

  const sumOf = (row, prefix) => Object.entries(row).reduce((sum, [name, value]) => sum + (name.startsWith(prefix) ? value || 0 : 0), 0);
  const steady = (name) => (rows) => rows.map((row) => row[name]);
  function wasted(rows) {
    let lost = 0, made = 0;
    return rows.map((row) => { lost += sumOf(row, "tail/wasted_tokens/"); made += row["tokens/generated"] || 0; return made ? lost / made : null; });
  }
  const CHARTS = [
    ["reward", [["reward", steady("reward"), "solid"], ["held-out accuracy", steady("eval/accuracy"), "markers"]]],
    ["length, tokens", [["mean", steady("completions/mean_length"), "solid"], ["p90", steady("completions/p90_length"), "dash"], ["longest", steady("completions/max_length"), "dot"]]],
    ["age of tokens: lag in optimizer steps, staleness in publications", [["lag, mean", steady("lag/mean"), "solid"], ["lag, max", steady("lag/max"), "dash"], ["staleness, max", steady("staleness/max"), "dot"]]],
    ["effective sample size", [["ESS", steady("ess"), "solid"]]],
    ["wasted tokens, share of all so far", [["wasted", wasted, "solid"]]],
    ["the trainer's waiting ratio, by round", [["waiting ratio", steady("round/waiting_ratio"), "solid"]]],
    ["share of groups and samples", [["groups of equal rewards", steady("frac_reward_zero_std"), "solid"], ["at the length limit", steady("completions/clipped_ratio"), "dash"]]],
  ];

  function positions(run, axis) {
    const { rows } = run.payload;
    if (!rows.length) return [];
    const first = rows[0], origin = first.wall_time - (first["time/step"] || 0);
    let samples = 0;
    return rows.map((row) => {
      samples += row["samples/trained"] || 0;
      return axis === "time" ? row.wall_time - origin : axis === "samples" ? samples : row.step;
    });
  }

  function chartTrace(run, [name, values, dash], axis) {
    const x = positions(run, axis), all = values(run.payload.rows), kept = [];
    for (let i = 0; i < all.length; i++) if (all[i] !== undefined && all[i] !== null) kept.push(i);
    const every = Math.ceil(kept.length / MAX_POINTS) || 1, some = kept.filter((_, i) => i % every === 0);
    const colour = RUN_COLOURS[run.number % RUN_COLOURS.length], isMarks = dash === "markers";
    return { type: "scatter", mode: isMarks || some.length === 1 ? "markers" : "lines", name: `${run.payload.name}: ${name}`, x: some.map((i) => x[i]), y: some.map((i) => all[i]),
      line: { color: colour, dash: isMarks ? "solid" : dash, width: 1.6 }, marker: { color: colour, symbol: isMarks ? "diamond" : "circle", size: 7 } };
  }

  async function drawFigures() {
    const axis = byId("x-axis").value, title = byId("x-axis").selectedOptions[0].text, known = runs.filter((run) => run.payload);
    for (const [number, [name, lines]] of CHARTS.entries()) {
      const traces = known.flatMap((run) => lines.map((line) => chartTrace(run, line, axis))).filter((trace) => trace.x.length);
      await Plotly.react(charts[number], traces, { font: FONT, title: { text: name, font: { size: 13 } }, margin: { l: 50, r: 40, t: 30, b: 70 }, modebar: BUTTONS,
        uirevision: axis, hovermode: "x unified", showlegend: true, legend: { orientation: "h", y: -0.3, font: { size: 10 } }, xaxis: { title: { text: title, standoff: 5 } }, yaxis: { rangemode: "tozero" } }, PLOT);
    }
  }

  // ---- the page ----

  function makeParts(run) {
    const details = element("details", null, { open: run.number < NUM_DRAWN_AT_FIRST, className: "run" }), summary = element("summary");
    const parts = { details, title: element("h2"), state: element("span", "", { className: "state" }), advisories: element("div", "", { role: "status" }), doing: element("p", "", { className: "doing" }), cost: element("p", "", { className: "cost" }),
      engines: element("select", null, { multiple: true, size: 4, ariaLabel: "engines" }), pointer: element("p", "Click on a request to open its sample."),
      plot: element("div", null, { className: "timeline" }), idle: element("table", null, { className: "idle" }),
      stragglers: element("table", null, { className: "stragglers" }), samples: element("table", null, { className: "samples" }) };
    summary.append(parts.title, parts.state);
    const label = element("label", "only these engines "), all = element("button", "all engines", { type: "button" }), controls = element("div", null, { className: "controls" });
    label.append(parts.engines);
    parts.chooser = element("div", null, { hidden: true });
    parts.chooser.append(label, all);
    controls.append(parts.chooser, parts.pointer);
    const tables = element("div", null, { className: "tables" });
    for (const table of [parts.idle, parts.stragglers, parts.samples]) {
      const box = element("div");
      box.append(table);
      tables.append(box);
    }
    details.append(summary, parts.advisories, parts.doing, parts.cost, controls, parts.plot, tables);
    const choose = () => { run.engines = [...parts.engines.selectedOptions].map((option) => option.value); drawTexts(run); return drawTimeline(run); };
    parts.engines.addEventListener("change", choose);
    all.addEventListener("click", () => { parts.engines.selectedIndex = -1; choose(); });
    details.addEventListener("toggle", () => {
      // A browser has few WebGL contexts: a closed run gives its own back.
      if (details.open && run.payload && !run.listens) drawTimeline(run);
      if (!details.open) { Plotly.purge(parts.plot); run.listens = false; }
    });
    byId("runs").append(details);
    return parts;
  }

  async function draw(changed) {
    for (const run of changed) { drawTexts(run); await drawTimeline(run); }
    if (changed.length) { await drawFigures(); window.tailrace.draws += 1; }
    for (const run of runs) if (run.payload) drawState(run);
  }

  async function poll() {
    const begun = performance.now();
    let pause = POLL_MS;
    try {
      const changed = [];
      for (const run of runs) if (await fetched(run)) changed.push(run);
      await draw(changed);
      byId("connection").textContent = "";
      // A long trace takes long to draw; most of the time is left to the reader.
      pause = Math.max(POLL_MS, Math.min(20000, 4 * (performance.now() - begun)));
    } catch (why) {
      byId("connection").textContent = `no answer from the server: ${why.message}`;
    }
    setTimeout(poll, pause);
  }

  for (const run of runs) run.parts = makeParts(run);
  const charts = CHARTS.map(() => byId("figures").appendChild(element("div", null, { className: "chart" })));
  byId("figures").className = "charts";
  byId("x-axis").addEventListener("change", drawFigures);
  byId("same-scale").parentElement.hidden = runs.length < 2;
  byId("same-scale").checked = runs.length > 1;
  byId("same-scale").addEventListener("change", () => runs.forEach((run) => run.payload && drawTimeline(run)));
  byId("colour").addEventListener("change", drawTokens);
  if (isServed) poll();
  else draw(runs.filter((run) => take(run, data.runs[run.number])));
})();
