"use strict";
// The page of `tailrace view`: four views, kept up to date while the runs go on.
{
  const POLL_MS = 2000, MAX_POLL_MS = 20000;
  const given = JSON.parse(byId("data").textContent);
  const source = given.runs ? new EmbeddedSource(given.runs) : new ServedSource();
  const runs = Array.from({ length: given.num_runs }, (_, number) => ({ number, figures: null, record: null, isLive: source.isLive }));
  const samples = new SamplesView(runs, source);
  const openSample = (run, id) => go(`#/samples/${run.number}/${encodeURIComponent(id)}`);
  const overview = new Overview(runs, source), timeline = new TimelineView(runs, source, openSample), accounts = new AccountsView(runs);
  const VIEWS = { overview: ["Overview", () => overview.draw()], timeline: ["Timeline", () => timeline.draw()], samples: ["Samples", () => samples.load()], accounts: ["Accounts", () => accounts.draw()] };
  let shown = "overview";
  /** `draws`: drawn updates; `windows`: loaded ranges of the timeline. Tests read them. */
  window.tailrace = { runs, overview, timeline, samples, draws: 0, windows: 0 };

  /** Go to an address of this page; Back leads to the one before. */
  async function go(hash) {
    if (location.hash !== hash) history.pushState(null, "", hash);
    await route();
  }

  /** Show what the address names: a view, a range of the timeline, or a sample. */
  async function route() {
    const [, name = "overview", number, id] = location.hash.split("/");
    await show(name in VIEWS ? name : "overview");
    if (shown === "timeline" && number) timeline.route();
    const run = runs[Number(number)];
    if (shown !== "samples" || !id || !run) return;
    Object.assign(samples, { run, kind: "trained" });
    samples.runs_.value = String(run.number);
    samples.group = { name: decodeURIComponent(id).split("/")[0], rows: [] };
    await samples.load();
    await samples.open(decodeURIComponent(id), true);
  }
  addEventListener("popstate", route); // Back, forward, and an address that a reader has changed

  async function show(name) {
    shown = name;
    for (const each of Object.keys(VIEWS)) byId(each).hidden = each !== name;
    for (const tab of document.querySelectorAll(".tabs button")) { tab.ariaSelected = String(tab.value === name); tab.tabIndex = tab.value === name ? 0 : -1; }
    if (!location.hash.startsWith(`#/${name}`)) history.replaceState(null, "", `#/${name}`); // an id of the page would scroll to it
    if (runs.some((run) => run.figures)) drawHead(runs);
    await VIEWS[name][1]();
  }

  for (const [value, [text]] of Object.entries(VIEWS)) {
    document.querySelector(".tabs").append(element("button", { type: "button", role: "tab", value, onclick: () => go(`#/${value}`) }, text));
  }

  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, select, textarea"), name = event.key.toLowerCase();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.role === "tab" && ["arrowleft", "arrowright"].includes(name)) {
      const all = Object.keys(VIEWS), next = all[(all.indexOf(shown) + (name === "arrowright" ? 1 : all.length - 1)) % all.length];
      go(`#/${next}`).then(() => document.querySelector(`.tabs [value="${next}"]`).focus());
      return;
    }
    if (/^[1-4]$/.test(name)) go(`#/${Object.keys(VIEWS)[Number(name) - 1]}`);
    else if (shown === "timeline" ? timeline.onKey(name) : shown === "samples" && samples.onKey(name)) event.preventDefault();
  });

  let resizing = null;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
  // What is printed: overview and accounts, and the view that is open.
  addEventListener("beforeprint", () => { for (const name of ["overview", "accounts"]) { byId(name).hidden = false; VIEWS[name][1](); } });
  addEventListener("afterprint", () => show(shown));

  async function redraw() {
    if (runs.some((run) => run.figures)) await VIEWS[shown][1]();
  }

  async function draw() {
    if (shown !== "overview") drawHead(runs);
    // A reader of samples is not disturbed; new ones come with the next search.
    if (shown !== "samples" || !samples.rows.length) await VIEWS[shown][1]();
    window.tailrace.draws += 1;
  }

  /** Ask for one part of every run, and whether any has news. */
  async function news(part) {
    const found = await Promise.all(runs.map(async (run) => {
      const answer = await source[part](run.number);
      if (answer) run[part] = answer;
      return Boolean(answer);
    }));
    return found.some(Boolean);
  }

  /** Ask once for a faster schedule than that of a run which has ended: the answer takes seconds. */
  async function askFaster(run) {
    run.faster = {};
    run.faster = await source.faster(run.number);
    drawHead(runs);
  }

  async function poll(part) {
    const begun = performance.now();
    try {
      if (await news(part)) {
        if (part === "figures") await overview.reload();
        await draw();
      }
      await Promise.all(runs.filter((run) => run.record?.state.kind === "finished" && !run.faster).map(askFaster));
      byId("connection").textContent = source.isLive ? "" : "a snapshot of the run";
    } catch (why) {
      byId("connection").textContent = `no answer from the server: ${why.message}`;
    }
    // A long run takes long to read; most of the time is left to the reader.
    if (source.isLive) setTimeout(() => poll(part), Math.max(POLL_MS, Math.min(MAX_POLL_MS, 4 * (performance.now() - begun))));
  }

  route();
  poll("figures").then(() => poll("record")); // curves come before a long run log is read
}
