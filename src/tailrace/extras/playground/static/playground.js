"use strict";
// The page: sliders and schedules on one side, the simulator on the other. A newer set-up replaces one that waits.
{
  const base = new URL(".", location.href).href, isEmbedded = window.top !== window;
  /** The schedules in a page of the documentation, which has less room. */
  const EMBEDDED = ["serial", "tailrace"];
  let setUp, simulator, runs = [], isSimulating = false;
  /** `answers`: shown answers; `isIdle`: all questions are answered. Tests read them. */
  window.playground = { answers: 0, get isIdle() { return !isSimulating; }, get runs() { return runs; }, get setUp() { return setUp; }, get simulator() { return simulator; } };

  const read = async (name) => (await fetch(base + name)).json();
  const state = (text, share = null) => byId("state").replaceChildren(text, share === null ? "" : element("progress", { value: share }));

  const page = {
    choose(run, name) { setUp.names[runs.indexOf(run)] = name; run.name = name; redrawRuns(); changed([run]); },
    remove(run) { setUp.names.splice(runs.indexOf(run), 1); runs = runs.filter((each) => each !== run); redrawRuns(); changed([]); },
    lines(run, text) { if (text === null) delete setUp.lines[run.name]; else setUp.lines[run.name] = text; changed([run]); },
  };

  function drawControls() {
    const presets = element("select", { id: "preset", onchange: () => { setUp.choose(presets.value); setUp.lines = {}; showRuns({}); changed(); } }, ...Object.entries(setUp.presets).map(([name, { title }]) => element("option", { value: name, selected: name === setUp.preset }, title)));
    const sliders = setUp.sliders.map(({ key, label, unit, values }) => {
      const shown = element("output", {}, setUp.said(key, unit));
      const input = element("input", { type: "range", id: key, min: 0, max: values.length - 1, step: 1, ariaValueText: setUp.said(key, unit), oninput: () => {
        setUp.set(key, values[Number(input.value)]);
        if (key === "sim.cluster.devices") { drawControls(); byId(key).focus(); }
        shown.textContent = input.ariaValueText = setUp.said(key, unit);
        changed();
      } });
      input.value = values.indexOf(setUp.values[key]);
      return element("div", { className: "slider" }, element("label", { htmlFor: key }, label), shown, input);
    });
    byId("controls").replaceChildren(element("div", { className: "slider" }, element("label", { htmlFor: "preset" }, "Set-up"), presets), element("p", { className: "muted small" }, setUp.of.note), ...sliders);
  }

  function redrawRuns() {
    const add = element("select", { ariaLabel: "add a schedule", onchange: () => { setUp.names.push(add.value); const run = new RunView(add.value, page, setUp); runs.push(run); redrawRuns(); changed([run]); } },
      element("option", { value: "" }, "+ add a schedule"), ...Object.keys(setUp.schedules).filter((name) => !setUp.names.includes(name)).map((name) => element("option", { value: name }, name)));
    for (const run of runs) { run.open(run.isStranger ? run.draft : null); run.close.hidden = runs.length === 1; }
    byId("runs").replaceChildren(...runs.map((run) => run.card), ...(runs.length < MAX_SCHEDULES ? [add] : []));
  }

  function drawAll() {
    const known = runs.filter((run) => run.answer), end = Math.max(...known.map((run) => run.answer.window.to), 1e-3);
    for (const run of known) run.draw(end);
    byId("verdict").textContent = verdictOfRuns(known);
    window.playground.answers += 1;
  }

  /** The set-up has changed: simulate these runs anew; those with a stranger's lines wait for a click. */
  function changed(which = runs) {
    history.replaceState(null, "", setUp.address ? `#${setUp.address}` : location.pathname + location.search);
    byId("notice").hidden = true;
    for (const run of which) run.isDue = true;
    if (!isSimulating) simulate();
    else drawAll();
  }

  async function simulate() {
    isSimulating = true;
    for (let run; (run = runs.find((each) => each.isDue && !each.isStranger));) {
      run.isDue = false;
      run.card.ariaBusy = "true";
      if (simulator.isReady) state(`simulating ${run.name}`);
      const answer = await simulator.ask(setUp.question(run.name, run.lines));
      run.card.ariaBusy = "false";
      if (!runs.includes(run)) continue; // it was taken away meanwhile
      run.show(answer);
      drawAll();
    }
    state(simulator.isReady ? "" : byId("state").textContent);
    isSimulating = false;
  }

  /** Show the set-up anew. `strange`: lines of a link, by schedule, which wait for a click. */
  function showRuns(strange) {
    runs = setUp.names.map((name) => Object.assign(new RunView(name, page, setUp), { isStranger: name in strange, draft: strange[name] ?? null }));
    drawControls();
    redrawRuns();
  }

  function fromAddress() {
    let problem = "";
    try { setUp.read(location.hash.slice(1)); } catch (why) { problem = why.message; }
    const strange = setUp.lines;
    setUp.lines = {};
    showRuns(strange);
    byId("notice").hidden = !problem;
    byId("notice").textContent = problem;
  }

  async function begin() {
    const [presets, schedules, answers] = await Promise.all(["presets.json", "schedules.json", "first.json"].map(read));
    setUp = new SetUp(presets, schedules, isEmbedded ? EMBEDDED : presets.tail.schedules);
    simulator = new Simulator(base, ({ doing, share, python }) => { simulator.isReady = Boolean(python); state(python ? "" : doing, python ? null : share); });
    document.body.classList.toggle("embedded", isEmbedded);
    byId("whole").hidden = !isEmbedded;
    byId("whole").onclick = () => { byId("whole").href = location.href; };
    fromAddress();
    byId("legend").append(...[["blue", "response"], ["amber", "aborted, goes on later"], ["teal", "not ended; gradients"], ["cause-step", "optimizer step"], ["cause-publication", "new weights"]].map(([name, text]) => element("span", {}, key(colour(name)), text)), element("span", {}, "white: waiting"));
    byId("link").onclick = async () => { await navigator.clipboard.writeText(location.href); byId("link").textContent = "copied"; setTimeout(() => { byId("link").textContent = "copy link"; }, 1500); };
    // What the simulator answered when the page was built: it is shown until a reader changes something.
    const isFirst = location.hash.length < 2;
    if (isFirst) { for (const run of runs) run.show(answers[run.name]); drawAll(); } else changed();
    if (isFirst && isEmbedded) for (const name of ["pointerdown", "keydown"]) addEventListener(name, () => simulator.start().catch((why) => state(why.message)), { once: true });
    else simulator.start().catch((why) => state(why.message));
  }

  let resizing = null;
  const redraw = () => { if (runs.some((run) => run.answer)) drawAll(); };
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 100); });
  addEventListener("hashchange", () => { setUp.choose("tail"); fromAddress(); changed(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  begin().catch(() => state("a file of the playground is missing: serve its whole folder over HTTP"));
}
