"""The figures of a run: one table of their names, units, meanings, and of what several rows come to.

A row is a dict of figures by name: one an optimizer step, one a round, one an evaluation, and one for what
was counted at the end. `steps.StepMeter` makes rows, and every sink receives them. metrics.jsonl,
summary.json, the comparison of schedules, the planner and docs/reference/metrics.md follow from the table.
Names are those of TRL where TRL has the figure, then those of prime-rl and verl.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias, TypeVar

from tailrace.record.events import Row
from tailrace.types import Sample

N = TypeVar("N", int, float)
Rows: TypeAlias = Sequence[Row]
Total: TypeAlias = Callable[[Rows, str], float]
"""Aggregates a figure over rows."""

CALLS = "environment/calls"
"""Calls of tools in a sample: the figure "rewards/environment/calls" in runs of the environment "tools"."""


def summed(rows: Rows, name: str) -> float:
    """The sum over the rows that have the figure."""
    return sum(row.get(name, 0) for row in rows)


def largest(rows: Rows, name: str) -> float:
    """The largest value; 0 if no row has the figure."""
    return float(max((row[name] for row in rows if name in row), default=0.0))


def last(rows: Rows, name: str) -> float:
    """The value in the last row that has the figure; 0 if none has."""
    return next((row[name] for row in reversed(rows) if name in row), 0.0)


def over_tokens(rows: Rows, name: str) -> float:
    """Mean over trained tokens."""
    return _weighted(rows, name, "tokens/trained")


def over_samples(rows: Rows, name: str) -> float:
    """Mean over trained samples."""
    return _weighted(rows, name, "samples/trained")


def over_steps(rows: Rows, name: str) -> float:
    """Mean over optimizer steps."""
    return statistics.fmean(row[name] for row in rows if name in row)


def over_rounds(rows: Rows, name: str) -> float:
    """Mean over rounds. A round that lacks the figure counts as 0."""
    return statistics.fmean(row.get(name, 0.0) for row in rounds_of(rows))


def over_time(rows: Rows, name: str) -> float:
    """Sum of the rounds' figure over the whole time of the rounds, in which the time between rounds counts:
    schedules that never stop generate in it."""
    rounds = rounds_of(rows)
    whole_s = rounds[-1]["round/end_s"] - rounds[0]["round/end_s"] + rounds[0]["round/time_s"]
    return summed(rounds, name) / whole_s


def over_wall_time(rows: Rows, name: str) -> float:
    """Sum of the steps' figure over the time on the clock of the wall. Restarts are in it, and so are steps
    that a restart has undone, whose own rows are gone."""
    steps = steps_of(rows)
    whole_s = steps[-1]["wall_time"] - steps[0]["wall_time"] + steps[0]["time/step"]
    return summed(steps, name) / whole_s if whole_s else 0.0


def over_rollouts(rows: Rows, name: str) -> float:
    """Sum of the rounds' figure over the time of the rollouts; over the whole time if one never stops."""
    rounds = rounds_of(rows)
    if not all(row.get("round/rollout_time_s") for row in rounds):
        return over_time(rows, name)
    return summed(rounds, name) / summed(rounds, "round/rollout_time_s")


def per_sample(rows: Rows, name: str) -> float:
    """Sum of the rounds' figure over their trained samples."""
    return summed(rows, name) / summed(rows, "round/num_samples")


def per_thousand_samples(rows: Rows, name: str) -> float:
    """Sum of the rounds' figure over the thousands of their trained samples."""
    return 1000.0 * per_sample(rows, name)


def of_batch(rows: Rows, name: str) -> float:
    """Sum over all completion tokens of the trained samples."""
    masked = summed(rows, "tokens/masked")
    return summed(rows, name) / max(1, masked + summed(rows, "tokens/trained"))


def of_generated(rows: Rows, name: str) -> float:
    """Sum of a family of counts over all generated tokens."""
    generated = summed(rows, "tokens/generated")
    return sum(family(counts_of(rows), name).values()) / generated if generated else 0.0


def over_control(rows: Rows, name: str) -> float:
    """Mean over the samples of groups with rules, over that of control groups, minus 1."""
    ruled, control = _against_control(rows, name, "completions/mean_length")
    return ruled / control - 1.0 if control else 0.0


def less_control(rows: Rows, name: str) -> float:
    """Mean reward of the samples of groups with rules, less that of control groups."""
    ruled, control = _against_control(rows, name, "reward")
    return ruled - control


def _against_control(rows: Rows, name: str, of_all: str) -> tuple[float, float]:
    steps = steps_of(rows)
    number, control = summed(steps, "samples/trained"), summed(steps, "control/samples")
    sum_of_control = sum(row[name] * row["control/samples"] for row in steps if name in row)
    sum_of_all = sum(row[of_all] * row["samples/trained"] for row in steps)
    return (sum_of_all - sum_of_control) / max(1, number - control), sum_of_control / max(1, control)


def _weighted(rows: Rows, name: str, weight: str) -> float:
    found = [row for row in rows if name in row]
    return sum(row[name] * row[weight] for row in found) / max(1, sum(row[weight] for row in found))


class Figure(NamedTuple):
    """One line of the table."""

    group: str
    """Kind of the rows that have it: step, evaluation, ..."""
    name: str
    """Its key in a row. One that ends with "/" is a family: every key that begins so."""
    unit: str
    total: Total | None
    """Aggregates the figure over several rows; None: it is never asked for."""
    kept: Mapping[str, str]
    """Its keys in sections of summary.json ("ages", "round") and in the figures of a trial ("trial")."""
    meaning: str
    printed: tuple[str, str]
    """Its label, and the format of its value, in printed tables; empty: it is in none."""


TABLE = """
# row
step | optimizer steps | - | - | Since the start of the run, with this step.
round | - | - | - | Index of the round; of an evaluation, the one that is about to start.
time | s | - | - | On the run's clock; of a step, its end.
wall_time | s | - | - | Unix time; in virtual time, virtual seconds.
# step
num_tokens | tokens | - | - | Trained so far, prompts and completions, as TRL counts: cumulative.
tokens/trained | tokens | summed | - | Completion tokens of the step in the loss.
tokens/masked | tokens | of_batch | trial.masked_share | masked tokens {:.1%} | Those that are masked, because
    they are too old. Left out without any, as is the next.
masked/tenth/ | share | - | - | Masked tokens of each tenth of the response.
samples/trained | samples | summed | - | Samples of the step.
reward | - | - | - | Mean over samples.
rewards/ | - | - | - | Mean of each of several reward functions by its name, and of each number that functions
    report, over the samples that have it.
reward/source/ | - | - | - | Mean reward of each data source that has a name.
reward_std | - | - | - | Standard deviation of the rewards in a group, mean over groups.
frac_reward_zero_std | share | - | - | Groups whose rewards are all equal: they have no gradient.
completions/mean_length | tokens | - | - | Mean length of the completions.
completions/min_length | tokens | - | - | The shortest completion.
completions/p50_length | tokens | - | - | Their median length.
completions/p90_length | tokens | - | - | 90th percentile.
completions/p99_length | tokens | - | - | 99th percentile.
completions/max_length | tokens | - | - | The longest completion.
completions/std_length | tokens | - | - | Standard deviation of their lengths (APRIL, Fig. 5a).
completions/std_length_in_group | tokens | - | - | The same within a group, mean over groups (Fig. 5b).
completions/clipped_ratio | share | over_samples | trial.truncated_share | truncated samples {:.1%} | Samples
    that ended at the length limit.
num_turns/mean | turns | - | - | Turns of a sample, mean. Only where an environment takes part.
num_turns/max | turns | - | - | The most.
num_branches/mean | branches | - | - | Branches of a sample, mean: 1, and 1 more for each time that its
    history was rewritten.
num_branches/max | branches | - | - | The most.
environment_tokens/mean | tokens | - | - | Tokens of the environment in a sample: context that is not trained.
    A new branch counts whole.
tools/call_frequency | calls | - | - | Calls of the environment in a sample, mean, as TRL counts.
loss | - | - | - | Mean over trained tokens.
grad_norm | - | - | - | Global norm of the gradient before clipping.
learning_rate | - | - | - | Of the optimizer step.
entropy | nats a token | - | - | Entropy of the policy at the sampling temperature.
clip_ratio/region_mean | share | - | - | Tokens whose gradient the clip removed.
kl | nats a token | - | - | KL of the current policy to the reference model or the teacher; 0 without one.
mismatch_kl | nats a token | over_tokens | trial.mismatch_kl | KL of the behaviour policy (engine) to the
    current one (trainer). The age of the tokens is in it.
engine_mismatch_kl | nats a token | - | - | The same over samples generated entirely by the weights that are
    trained: the numerical difference of engine and trainer. Left out if the step has no such samples.
ess | share | over_steps | trial.ess_mean | effective sample size {:.3f} | Effective sample size of the
    trained tokens.
ess/guard | share | - | - | The smallest effective sample size that the schedule asked for before this step.
value_loss | - | - | - | Loss of the critic.
skipped | - | - | - | 1 if the gradient was not finite and the weights stayed as they were.
staleness/mean | publications | over_tokens | ages.staleness_mean trial.staleness_mean | Publications between
    the weights that produced a token and the published ones.
staleness/max | publications | largest | ages.staleness_max trial.staleness_max | staleness, max
    (publications) {:.0f} | The largest of a token.
lag/mean | optimizer steps | over_tokens | ages.lag_mean trial.lag_mean | lag, mean (optimizer steps) {:.2f} |
    Optimizer steps between the weights that produced a token and those that were trained.
lag/max | optimizer steps | largest | ages.lag_max trial.lag_max | lag, max (optimizer steps) {:.0f} | The
    largest of a token.
lag/tenth/ | optimizer steps | - | - | Mean lag of each tenth of the response, 0 to 9 (PipelineRL, Fig. 3a).
carried/tokens | share | over_tokens | ages.carried_tokens trial.carried_tokens | carried tokens {:.1%} |
    Tokens that are older than the published weights.
carried/samples | share | over_samples | trial.carried_samples | carried samples {:.1%} | Samples that have
    such a token.
versions/mean | versions | - | - | Versions of the weights that produced a sample, mean.
versions/max | versions | largest | ages.versions_max | The most of a sample.
deferrals/mean | - | - | - | How often a group was parked or deferred, mean over groups.
deferrals/max | - | largest | ages.deferrals_max trial.deferrals_max | The most of a group.
age/mean | rounds | - | - | Rounds since a group was drawn, mean over groups.
age/max | rounds | largest | ages.rounds_max | The most of a group.
probe/difference | nats a token | largest | - | The largest difference of an engine's log-probs of the probe
    to the trainer's since the last step, mean over its tokens, after its newest weights were loaded.
probe/time_s | s | summed | - | Time for which engines were held to answer probes.
control/samples | samples | - | - | Samples of the step that are of control groups ([run.groups] control).
control/mean_length | tokens | - | - | Their mean length.
control/reward | - | - | - | Their mean reward.
bias/length | share | last | bias.length | Mean length of the samples trained so far over that of all
    responses to the prompts drawn so far, minus 1. Those that are not complete count as longer than they are.
bias/reward | - | last | bias.reward | Mean reward of the samples trained so far, less that of all responses.
bias/delay | rounds | last | bias.delay | Mean age, from draw to training, of the tokens trained so far, less
    that of the samples: above 0, long responses are trained later than short ones.
bias/source/ | share | - | - | Share of each data source that has a name in the samples trained so far, less
    its share of the prompts drawn so far.
stage/groups/ | groups | - | - | The most groups at a time, since the last step, in each stage between engines
    and trainer: `generated` (they wait for the scorers), `scoring`, `ready` (for the trainer).
stage/blocked_s/ | s | - | - | Time since the last step in which a full stage blocked the stage before it.
    Groups that a full stage drops are in groups/dropped/, as `generated_overflow` and `ready_overflow`.
pool/ | rows | - | - | Rows of each difficulty pool ([data.pools]), `easy` and `hard`. What they pass over is
    in groups/dropped/, as `easy_pool` and `hard_pool`.
time/step | s | - | - | Since the last step's end or the round's start: time/train + time/wait. Publishing and
    evaluation are not in it.
time/wait | s | - | - | Part of time/step in which the trainer did not compute.
time/train | s | - | - | Part of time/step in which the trainer computed.
cost/step | currency | - | - | Spent since the last step. Costs need [prices].
cost/total | currency | - | - | Spent so far by all processes of the run.
time/controller_lag | s | - | - | The latest that the controller's event loop ran since the last step.
perf/tokens_per_s | tokens/s | - | - | tokens/trained over time/step.
perf/max_memory_allocated_gb | GiB | - | - | The most GPU memory that the tensors of a trainer's process had
    since the last step; verl's name and unit. Left out on a CPU, as are the next two.
perf/max_memory_reserved_gb | GiB | - | - | The most that PyTorch's allocator held meanwhile.
perf/gpu_utilization | share | - | - | Time with a kernel on the trainer's busiest GPU in NVML's last
    sampling period (at most 1 s) before the step's end. Needs `pip install nvidia-ml-py`.
perf/engine_max_memory_allocated_gb | GiB | - | - | The most GPU memory that tensors of an embedded engine
    had between two of its answers to probes (weights.probe_every), of all engines. Left out on a CPU.
perf/engine_max_memory_reserved_gb | GiB | - | - | The most that PyTorch's allocator held meanwhile.
# evaluation
eval/reward | - | - | - | Mean reward on held-out prompts. Called eval/accuracy up to
    release 0.2; trackers get both names for one more release.
eval/solved | share | - | - | Samples whose reward is at least `run.eval_solved_at`.
eval/mean_tokens | tokens | - | - | Mean length of the completions.
eval/version | publications | - | - | The version of the weights that was evaluated, in publications since the
    start. `step` is that of these weights.
eval/num_samples | samples | - | - | Samples of the evaluation.
eval/ | - | - | - | avg@n and pass@k of each named data source; of `all` where a prompt has several samples.
# count
tokens/generated | tokens | summed | - | Tokens of training samples, counted when their request leaves an
    engine.
tail/wasted_tokens/ | tokens | of_generated | trial.waste_share | wasted tokens {:.1%} | Tokens that are never
    trained, by reason.
completions/failed/ | samples | summed | - | Samples whose reward failed or timed out, by reason.
groups/trained | groups | summed | - | Groups that were trained.
groups/filtered/ | groups | summed | - | Groups that were filtered, by reason.
groups/dropped/ | groups | summed | - | Groups that were dropped, by reason.
rows/skipped/ | rows | summed | - | Rows of the data that could not become a prompt, by reason.
engines/died/ | deaths | summed | - | Deaths of engines, by engine.
probe/failed/ | probes | summed | - | Answers that show that weights have not arrived, by engine.
kv/recomputed | publications | summed | - | Publications with which engines recomputed the KV cache of
    requests in flight.
engines/preempted/ | requests | summed | - | Requests preempted because the KV cache was full, by engine.
drafts/checked | tokens | summed | - | Drafted tokens that decode steps computed (engine.drafts).
drafts/accepted | tokens | summed | - | Of these, tokens that samples gained, evaluations included.
groups/parked | groups | summed | - | Neither trained nor given up at the end of the run; only in the last
    row.
tokens/parked | tokens | summed | - | Tokens of these groups, without drafted ones.
tokens/drafted | tokens | summed | - | Tokens of these groups that were drawn for a later round, whose weights
    had not verified them.
# round
round/end_s | s | - | - | End of the round on the run's clock.
round/time_s | s | - | - | From its start to its end, publishing included.
round/main_time_s | s | over_rounds | round.main_time_s trial.main_time_s | main time a round {:.2f} s | From
    the round's start to the end of its last optimizer step, publishing left out.
round/bound_s | s | over_rounds | trial.bound_s | bound of its own rounds {:.2f} s | Lower bound on
    main_time_s.
round/rollout_time_s | s | over_rounds | round.rollout_time_s trial.rollout_time_s | rollout {:.2f} s | From
    the round's start to the end of the last request that started in it. Left out where requests outlive their
    round, as in schedules that never stop generating.
round/first_dispatch_s | s | over_rounds | round.first_dispatch_s trial.first_dispatch_s | first dispatch
    {:.2f} s | From the round's start to the start of the first accumulation.
round/trainer_compute_s | s | over_rounds | round.trainer_compute_s trial.trainer_compute_s | trainer compute
    {:.2f} s | Main time in which the trainer computes.
round/wait_s | s | - | round.wait_s | All other main time: wait_s + trainer_compute_s = main_time_s.
round/waiting_ratio | share | over_rounds | round.waiting_ratio trial.waiting_ratio | waiting ratio {:.3f} |
    wait_s over main_time_s: the headline of RolloutPipe 5.1.
round/start_ratio | share | - | round.start_ratio | first_dispatch_s over main_time_s (RolloutPipe eq. 4). It
    leaves out the waits between two dispatches.
round/publish_s | s | - | round.publish_s | Publishing of weights.
round/changed_weights | share | - | - | Weights whose bfloat16 value changed from one publication to the next,
    by 65,536 elements of each larger tensor; mean over the round's publications. Left out in a simulation.
round/num_steps | optimizer steps | - | - | Of the round.
round/num_groups | groups | - | - | Trained groups.
round/num_samples | samples | - | - | Trained samples.
round/num_tokens | tokens | - | - | Completion tokens of the trained samples.
round/num_generated | tokens | - | - | Gained by requests that left an engine in this round.
round/generated_tokens_per_s | tokens/s | - | round.generated_tokens_per_s | num_generated over
    rollout_time_s; over the whole round where that is left out.
round/cost | currency | over_rounds | trial.round_cost | cost a round {:,.4f} | Spent since the last round.
round/reward | - | over_rounds | trial.reward | reward {:.3f} | Mean over samples.
round/completions/mean_length | tokens | - | - | Of the round.
round/completions/min_length | tokens | - | - | Of the round.
round/completions/p50_length | tokens | - | - | Of the round.
round/completions/p90_length | tokens | - | - | Of the round.
round/completions/p99_length | tokens | - | - | Of the round.
round/completions/max_length | tokens | - | - | Of the round.
round/completions/std_length | tokens | - | - | Of the round.
round/first_step_length | tokens | - | - | Mean length of the first step's samples. Training in order of
    completion takes the short ones first.
round/last_step_length | tokens | - | - | Mean length of the last step's samples.
# trial
round/num_samples | samples/s | over_time | trial.samples_per_s | samples/s {:.1f} | Trained samples over the
    whole time of the rounds and of the time between them.
round/num_tokens | tokens/s | over_time | trial.tokens_per_s | tokens/s {:,.0f} | Trained tokens over the same
    time.
round/num_tokens | tokens/s | over_rollouts | trial.rollout_tokens_per_s | rollout tokens/s {:,.0f} | Trained
    tokens over the time of the rollouts; over the whole time if the rollout never stops.
round/main_time_s | s | per_thousand_samples | trial.main_s_per_1000_samples | per 1,000 samples {:.2f} s |
    Main time of all rounds over the thousands of trained samples.
time/train | share | over_wall_time | trial.ettr | Effective training time ratio (RobustRL, 2512.22492) of the
    steps that count, over the time on the clock.
round/cost | currency | per_thousand_samples | trial.cost_per_1000_samples | cost per 1,000 samples {:,.4f} |
    Cost of trained samples.
round/num_tokens | tokens | per_sample | trial.length_mean | length, mean (tokens) {:,.0f} | Length of a
    trained sample.
round/completions/max_length | tokens | largest | trial.length_max | length, max (tokens) {:,.0f} | The
    longest trained sample.
control/mean_length | share | over_control | trial.length_bias | length bias {:+.1%} | Mean trained length
    over the mean without interruptions, minus 1. A run knows that of control groups; the planner and
    benchmarks/race know all.
control/reward | - | less_control | trial.reward_bias | reward bias {:+.3f} | Mean reward less that of control
    groups.
- | s | - | trial.time_to_reward_s | Until the held-out reward reaches a target. Only benchmarks/race
    measures it.
"""
"""name | unit | what it comes to over rows | its keys elsewhere | meaning

Before the meaning of a figure that is printed stand its label and its format.
A trial, which `tailrace compare --json` and the planner have, has what figures come to over its rows, and a
comparison the median of trials. In summary.json, section "ages" has what figures come to over all rows, and
section "round" has medians over rounds. Figures of the group "row" are in every row. Counts are of what
happened since the last row. Those of a round that trained, the measures of RolloutPipe 5.1, are in the object
of its last step. Percentiles are nearest-rank: each is a length that occurred. Figures of the group "trial"
are in no row: they are second totals of figures of rounds, or are measured outside of the run.
"""


def _figures() -> Iterator[Figure]:
    group = ""
    for line in TABLE.strip().replace("\n    ", " ").splitlines():
        if line.startswith("# "):
            group = line.removeprefix("# ")
            continue
        name, unit, total, kept, *printed, meaning = (cell * (cell != "-") for cell in line.split(" | "))
        keys, total_of = dict(key.split(".") for key in kept.split()), TOTALS[total] if total else None
        label, brace, form = "".join(printed).partition(" {")
        yield Figure(group, name, unit, total_of, keys, meaning, (label, brace.strip() + form))


LENGTHS = ("mean", "min", "p50", "p90", "p99", "max", "std")
TOTALS: Mapping[str, Total] = {
    total.__name__: total
    for total in (
        summed, largest, last, over_tokens, over_samples, over_steps, over_rounds, over_time, over_wall_time,
        over_rollouts, per_sample, per_thousand_samples, of_batch, of_generated, over_control, less_control,
    )
}  # fmt: skip
_ALL = list(_figures())
FIGURES = [figure for figure in _ALL if figure.group != "trial"]
"""Figures of rows, in the order of metrics.jsonl."""
TRIAL_FIGURES: Mapping[str, Figure] = {each.kept["trial"]: each for each in _ALL if "trial" in each.kept}
"""The figures of a trial by their key there."""


def _printed(keys: str) -> Mapping[str, tuple[str, str]]:
    """Label and format of figures of a trial by their key."""
    return {key: TRIAL_FIGURES[key].printed for key in keys.split()}


TIMES = _printed(
    "main_time_s main_s_per_1000_samples bound_s waiting_ratio first_dispatch_s trainer_compute_s "
    "rollout_time_s reward samples_per_s tokens_per_s rollout_tokens_per_s"
)
COSTS = _printed("round_cost cost_per_1000_samples")
BIASES = _printed("length_bias reward_bias")
QUALITIES = _printed(
    "staleness_max lag_mean lag_max ess_mean masked_share carried_tokens carried_samples length_mean "
    "length_max truncated_share waste_share"
)
"""The figures of a trial in printed tables, in their order. Costs are in the user's currency, and a trial has
them only if it had prices; biases only if it had control groups."""

RENAMED: Mapping[str, str] = {"eval/accuracy": "eval/reward"}
"""Figures of earlier releases, and their names in this one."""

_RANKS = {figure.name: rank for rank, figure in enumerate(FIGURES)}


@cache
def _rank(name: str) -> int:
    """The place in the table of a figure, or of the family that it belongs to."""
    while name and name not in _RANKS:
        name = name.rstrip("/").rpartition("/")[0]
        name += "/" * bool(name)
    return _RANKS.get(name, len(_RANKS))


def figure_of(name: str) -> Figure | None:
    """The line of the table for a key of a row, or for its family; None: it is not in the table."""
    rank = _rank(name)
    return FIGURES[rank] if rank < len(FIGURES) else None


def _is_count(name: str) -> bool:
    found = figure_of(name)
    return found is not None and found.group == "count"


def ordered(row: Mapping[str, float]) -> Row:
    """The row in the order of the table."""
    return dict(sorted(row.items(), key=lambda item: _rank(item[0])))


def counts_of(rows: Iterable[Row]) -> Row:
    """Return the sums of the rows' counts."""
    counts: Row = {}
    for row in rows:
        for name, value in row.items():
            if _is_count(name):
                counts[name] = counts.get(name, 0) + value
    return counts


def joined(step: Row, end: Row) -> Row:
    """The row of a step and that of the round which it ends, as one row."""
    counts = {name: value for name, value in counts_of([step, end]).items() if value}
    return ordered({name: value for name, value in (step | end).items() if not _is_count(name)} | counts)


def family(row: Mapping[str, N], prefix: str) -> dict[str, N]:
    """The figures of a family by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in row.items()
        if name.startswith(prefix) and _rank(name) == _RANKS[prefix]
    }


def in_family(prefix: str, values: Iterable[tuple[object, N]]) -> dict[str, N]:
    """Values by the rest of their names, as figures of a family."""
    return {f"{prefix}{name}": value for name, value in values}


def steps_of(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


def evaluations_of(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "eval/reward" in row]


def rounds_of(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "round/time_s" in row]


# -- statistics --------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value; NaN where it is not finite."""
    result = statistics.mean(values)  # its sum does not overflow, unlike that of fmean
    return result if math.isfinite(result) else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divided by n - 1); 0 if all values are equal, NaN where it is not finite."""
    if len(set(values)) == 1:
        return 0.0
    centre = mean(values)
    # hypot scales its arguments: the squares of deviations above 1e154 would overflow.
    result = math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
    return result if math.isfinite(result) else math.nan


def length_figures(prefix: str, lengths: Sequence[int]) -> Row:
    """The statistics of at least one length, in any order."""
    ordered = sorted(lengths)
    p50, p90, p99 = (ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 99))
    centre = statistics.fmean(ordered), ordered[0], p50, p90, p99, ordered[-1]
    values = (*centre, standard_deviation(ordered))
    return {f"{prefix}{kind}_length": value for kind, value in zip(LENGTHS, values, strict=True)}


def mean_and_max(name: str, values: Sequence[int]) -> Row:
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values)}


def episode_figures(samples: Sequence[Sample]) -> Row:
    """The figures of the episodes of at least one sample; none if no sample is an episode of turns."""
    if not any(sample.turns for sample in samples):
        return {}
    num_turns = [len(sample.turns) - bool(sample.opening_ids) for sample in samples]
    num_branches = [len(sample.branches) for sample in samples]
    tokens = [sample.num_observation_tokens - len(sample.opening_ids) for sample in samples]
    calls = [sum(len(turn.results) for turn in sample.turns) for sample in samples]
    return {
        **mean_and_max("num_turns", num_turns),
        **mean_and_max("num_branches", num_branches),
        "environment_tokens/mean": statistics.fmean(tokens),
        "tools/call_frequency": statistics.fmean(calls),
    }
