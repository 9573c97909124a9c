"use strict";
// Sentences: what the trainer waited for, and what became of tokens, groups and weights.

/** The causes of causes.py; a wait is one "for ...". */
const CAUSES = {
  gradients: "gradients", step: "optimizer step", generating: "generating", tail: "the rollout's tail", generation: "generation", rewards: "rewards",
  weights: "new weights", publication: "publication of weights", evaluation: "evaluation", checkpoint: "writing of a checkpoint", lent: "its device, which is lent",
  dead: "dead engines", start: "the start of the run", end: "the end of the run", between: "bookkeeping between rounds", other: "other reasons",
};
const BUSY = ["gradients", "step", "generating"], MAX_NAMED = 3, LEAST_SHARE = 0.01;
/** Predicted gains below it are within the error of the simulator. */
const LEAST_GAIN = 1.1;

/** What the trainer waited for, how far the run is from its lower bound (record/bounds.py), and whether another schedule is predicted to be faster (faster.py). */
function verdictOf({ record, faster }) {
  const waits = record.shares.filter((each) => each.lane === "trainer" && !BUSY.includes(each.cause)), by = (name) => record.summary.find((each) => each.key === name)?.value;
  if (!record.recorded_s || by("main_time_s") === undefined) return "";
  const named = waits.filter((each) => each.share >= LEAST_SHARE).slice(0, MAX_NAMED).map((each) => `${percent(each.share)} for ${CAUSES[each.cause]}`).join(", ");
  const waited = `The trainer waited ${percent(waits.reduce((sum, each) => sum + each.share, 0))} of ${duration(record.recorded_s)}${named ? `: ${named}` : ""}.`;
  const [what, best, taken] = record.run_bound ? ["this run", ...record.run_bound] : ["a round", by("bound_s"), by("main_time_s")];
  const bound = best ? ` Under any schedule ${what} takes at best ${duration(best)} in place of ${duration(taken)}.` : "";
  if (!faster?.schedule) return `${waited}${bound} ${faster?.note || ""}`.trimEnd();
  if (faster.times < LEAST_GAIN) return `${waited}${bound} No other schedule that was simulated with its costs would be ${LEAST_GAIN} times faster.`;
  return `${waited}${bound} In a simulation with its costs, ${faster.schedule} is ${faster.times.toFixed(1)} times faster, at a mean lag of ${faster.lag_mean.toFixed(1)} optimizer steps.`;
}

const counted = (number, what) => `${format(number)} ${what}${number === 1 ? "" : "s"}`;
const spaced = (name) => name.replaceAll("_", " ").replaceAll("/", ": ");
const sumOf = (values) => Object.values(values).reduce((sum, value) => sum + value, 0);

/** Rows of [fate, number, share] of the numbers that are not 0. */
function fates(numbers, of) {
  return Object.entries(numbers).filter(([, number]) => number).map(([fate, number]) => [fate, number.toLocaleString("en"), number / Math.max(1, of)]);
}

/** The sections of the accounts of a run: title, sentence, and rows of label, text, share or null. */
function accountsOf({ figures, record }) {
  const { totals } = record, section = (name) => record.summary.filter((each) => each.section === name).map((each) => [each.label, each.text, null]);
  if (!totals.tokens) return [];
  const { tokens, groups } = totals, wasted = Object.fromEntries(Object.entries(tokens.wasted).map(([why, number]) => [`wasted: ${spaced(why)}`, number]));
  const ended = { trained: tokens.trained, "masked, because too old": tokens.masked, parked: tokens.parked, drafted: tokens.drafted, ...wasted };
  const all = { ...ended, "still open": Math.max(0, tokens.generated - sumOf(ended)) }, of = Math.max(1, sumOf(all));
  const lost = sumOf(wasted) ? `${percent(sumOf(wasted) / of, 1)} wasted` : "none wasted";
  const reasons = Object.fromEntries(Object.entries(groups.reasons).map(([why, number]) => [spaced(why), number])), drawn = { trained: groups.trained, parked: groups.parked, ...reasons };
  const problems = { "samples without a reward": totals.failures, "rows of the data skipped": totals.rows_skipped, "deaths of": totals.died, "requests preempted by": totals.preempted };
  return [
    ["Tokens", tokens.generated ? `${tokens.generated.toLocaleString("en")} tokens were generated; ${percent(tokens.trained / of, 1)} were trained, ${lost}.` : "", fates(all, of)],
    ["Groups", "", fates(drawn, sumOf(drawn))],
    ["Weights", weightsInWords(totals), []],
    ["Money", figures.cost, section("money")],
    ["Problems", "", Object.entries(problems).flatMap(([what, numbers]) => Object.entries(numbers).map(([why, number]) => [`${what}: ${spaced(why)}`, format(number), null]))],
    ["Time", "", section("time")],
    ["Age and length", "", section("age")],
    ["Trained against drawn", biasInWords(totals.bias), []],
    ["Bias of the rules", "", section("bias")],
  ].filter(([, text, rows]) => text || rows.length);
}

/** What was trained against what was drawn (record/bias.py); nothing for a run that does not have it. */
function biasInWords({ length, reward, delay }) {
  if (length === undefined) return "";
  const by = `${percent(Math.abs(length), 1)} ${length < 0 ? "shorter" : "longer"} than all that were drawn, their mean reward is ${Math.abs(reward).toFixed(3)} ${reward < 0 ? "below" : "above"} that of all`;
  return `Trained responses are ${by}. A token was trained ${Math.abs(delay).toFixed(1)} rounds ${delay < 0 ? "sooner" : "later"} after its draw than a response, in the mean.`;
}

/** Whether published weights arrived in the engines. */
function weightsInWords({ publications, probes, probes_failed, last_failed, difference, limit }) {
  if (!probes) return publications ? `${counted(publications, "publication")}, which no engine was asked to prove.` : "";
  const asked = `${counted(publications, "publication")}, ${counted(probes, "probe")} of engines: `;
  if (probes_failed) return `${asked}${format(probes_failed)} show that the weights had not arrived, the last one of ${last_failed}.`;
  return `${asked}the weights arrived each time. The largest difference of log-probs is ${difference.toPrecision(2)} nats a token, and up to ${limit.toPrecision(2)} is good.`;
}
