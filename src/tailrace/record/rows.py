"""The rows that are measured from a run's events, and their keys in metrics.jsonl.

`steps.StepMeter` makes the rows; every sink receives the same ones. The JSON key of a field is its `name=`,
or else the field's own name. Names are those of TRL where TRL has the figure, then those of prime-rl and
verl.

Two words for the age of a token are kept apart. Staleness counts publications of weights: it is what
schedules promise. Lag counts optimizer steps (PipelineRL 2.2): it grows within a round that has several
steps, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import nan
from typing import Any, TypeVar, get_origin

import msgspec
from msgspec import field

from tailrace.record.moments import LengthStats

S = TypeVar("S", bound=msgspec.Struct)

CALLS = "environment/calls"
"""Calls of tools in a sample: a key of `StepRow.rewards` in runs of the environment "tools"."""


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is counted as it happens. Values of consecutive rows add up to those of the run."""

    generated: int = field(name="tokens/generated", default=0)
    """Tokens of training samples, counted when their request leaves an engine."""
    wasted: dict[str, int] = field(name="tail/wasted_tokens", default_factory=Counter)
    """Tokens that will never be trained, by reason."""
    failed: dict[str, int] = field(name="completions/failed", default_factory=Counter)
    """Samples whose reward failed or timed out, by reason."""
    groups_trained: int = field(name="groups/trained", default=0)
    groups_filtered: dict[str, int] = field(name="groups/filtered", default_factory=Counter)
    groups_dropped: dict[str, int] = field(name="groups/dropped", default_factory=Counter)
    rows_skipped: dict[str, int] = field(name="rows/skipped", default_factory=Counter)
    """Rows of the data that could not become a prompt, by reason."""
    engines_died: dict[str, int] = field(name="engines/died", default_factory=Counter)
    """Deaths of engines, by engine."""
    preempted: dict[str, int] = field(name="engines/preempted", default_factory=Counter)
    """Requests preempted because the KV cache was full, by engine."""
    groups_parked: int | None = field(name="groups/parked", default=None)
    """Groups neither trained nor given up at the end of the run; only in the last row."""
    tokens_parked: int | None = field(name="tokens/parked", default=None)
    """Tokens of these groups."""

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both."""
        sums: dict[str, Any] = {}
        for name in self.__struct_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if isinstance(one, dict):
                sums[name] = Counter(one) + Counter(two)
            else:
                sums[name] = (one or 0) + (two or 0) if (one, two) != (None, None) else None
        return Counts(**sums)


class _RowInTime(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    """Optimizer steps so far, this row's included."""
    round: int
    """The index of the round: of an evaluation, the one that is about to start."""
    time_s: float = field(name="time")
    """Seconds on the run's clock; of a step, its end."""
    wall_time: float
    """Unix seconds; in virtual time, virtual seconds."""


class StepRow(_RowInTime, frozen=True, kw_only=True):
    """One optimizer step. Means are over the step's trained samples or tokens."""

    num_tokens: int
    """Tokens trained so far, prompts and completions, as TRL counts them: cumulative."""
    trained_tokens: int = field(name="tokens/trained")
    """Completion tokens of this step."""
    trained_samples: int = field(name="samples/trained", default=0)
    """Samples of this step. 0 in a file that was written without it."""

    reward: float
    """Mean over samples."""
    rewards: dict[str, float] = {}
    """The mean value of each of several reward functions by its name, and of each number that functions
    report, over the samples that have it."""
    reward_by_source: dict[str, float] = field(name="reward/source", default_factory=dict)
    """Mean reward of each data source that has a name."""
    reward_std: float
    """Mean over groups of the standard deviation within the group."""
    frac_reward_zero_std: float
    """Share of groups whose rewards are all equal: they have no gradient."""
    lengths: LengthStats = field(name="completions")
    clipped_ratio: float = field(name="completions/clipped_ratio")
    """Share of samples that ended at the length limit."""
    num_turns: dict[str, float] = {}
    """`mean` and `max` turns of a sample. This and the next three only where an environment takes part."""
    num_branches: dict[str, float] = {}
    """`mean` and `max` branches of a sample: 1, and 1 more for each time that its history was rewritten."""
    environment_tokens: float | None = field(name="environment_tokens/mean", default=None)
    """Tokens of the environment in a sample: context that is not trained. A new branch counts whole."""
    calls: float | None = field(name="tools/call_frequency", default=None)
    """Calls of the environment in a sample; mean over samples, as TRL counts tools."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    """Nats a token."""
    clip_ratio: float = field(name="clip_ratio/region_mean")
    """Share of tokens whose gradient the clip removed."""
    kl: float
    """KL of the current policy to the reference model, in nats a token; 0 without a reference."""
    mismatch_kl: float
    """KL of the behaviour policy (engine) to the current one (trainer), in nats a token. The age of the
    tokens is in it."""
    engine_mismatch_kl: float | None = None
    """The same over samples generated entirely by the weights that are trained: the numerical difference of
    engine and trainer. None if the step has no such samples."""
    ess: float
    """Effective sample size of the trained tokens, as a share."""
    ess_guard: float | None = field(name="ess/guard", default=None)
    """The smallest effective sample size that the schedule asked for before this step."""
    value_loss: float
    skipped: int
    """1 if the gradient was not finite and the weights stayed as they were."""

    staleness_mean: float = field(name="staleness/mean")
    """Publications between the weights that produced a token and the published ones."""
    staleness_max: int = field(name="staleness/max")
    lag_mean: float = field(name="lag/mean")
    """Optimizer steps between the weights that produced a token and those that were trained."""
    lag_max: int = field(name="lag/max")
    lag_by_tenth: dict[int, float] = field(name="lag/tenth")
    """Mean lag of each tenth of the response, 0 to 9 (PipelineRL, Fig. 3a)."""
    carried_tokens: float = field(name="carried/tokens")
    """Share of tokens older than the published weights."""
    carried_samples: float = field(name="carried/samples")
    """Share of samples that have such a token."""
    versions_mean: float = field(name="versions/mean")
    """Versions of the weights that produced a sample; mean over samples."""
    versions_max: int = field(name="versions/max")
    deferrals_mean: float = field(name="deferrals/mean")
    """How often a group was parked or deferred; mean over groups."""
    deferrals_max: int = field(name="deferrals/max")
    age_mean: float = field(name="age/mean")
    """Rounds since a group was drawn; mean over groups."""
    age_max: int = field(name="age/max")

    step_s: float = field(name="time/step")
    """Since the last step's end or the round's start: time/train + time/wait. Publishing and evaluation are
    not in it."""
    wait_s: float = field(name="time/wait")
    """Seconds of time/step in which the trainer did not compute."""
    train_s: float = field(name="time/train")
    controller_lag_s: float | None = field(name="time/controller_lag", default=None)
    """The latest that the controller's event loop ran since the last step."""
    tokens_per_s: float = field(name="perf/tokens_per_s")
    """tokens/trained over time/step."""
    counts: Counts
    """Counted since the last row."""


class RoundBound(msgspec.Struct, frozen=True):
    """Why a round takes longer than its lower bound, and the lower bound of the run so far (`bounds.py`)."""

    gap: str
    """Main time, bound, and what makes the difference, in words."""
    run_time_s: float
    """From the start of the first round of this process to the end of the round's last optimizer step."""
    run_bound_s: float
    """The lower bound of run_time_s."""


class RoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """One round that trained: the measures of RolloutPipe 5.1. Its keys begin with "round/".

    Main time runs from the round's start to the end of its last optimizer step. Publishing is not in it.
    All of it in which the trainer does not compute is wait: wait_s + trainer_compute_s = main_time_s.
    """

    round: int
    end_s: float
    """On the run's clock."""
    duration_s: float = field(name="time_s")
    """From its start to its end, publishing included."""
    main_time_s: float
    bound_s: float | None = None
    """The lower bound on main_time_s (`bounds.py`); None in a file that was written without it."""
    bound: RoundBound | None = None
    """What belongs to bound_s and is not in metrics.jsonl."""
    rollout_time_s: float | None = None
    """From the round's start to the end of the last request that started in it; None where requests outlive
    their round, as in schedules that never stop generating."""
    first_dispatch_s: float
    """From the round's start to the start of the first accumulation."""
    trainer_compute_s: float
    wait_s: float
    waiting_ratio: float
    """wait / (wait + compute): the headline of RolloutPipe 5.1."""
    start_ratio: float
    """(t_start - t_rollout_start) / (t_train_end - t_rollout_start): RolloutPipe eq. 4. It leaves out the
    waits between two dispatches."""
    publish_s: float
    changed_weights: float | None = None
    """Share of the weights whose bfloat16 value changed from one publication to the next, by 65,536 elements
    of each larger tensor; mean over the round's publications, None without one and in a simulation."""
    num_steps: int
    num_groups: int
    """Trained, like num_samples and num_tokens."""
    num_samples: int
    num_tokens: int
    """Completion tokens."""
    num_generated: int
    """Tokens that requests gained which left an engine in this round."""
    generated_tokens_per_s: float
    """Over rollout_time_s; over the whole round where that is None."""
    reward: float
    lengths: LengthStats = field(name="completions")
    first_step_length: float
    """Mean length of the first step's samples. Training in order of completion takes the short ones first."""
    last_step_length: float
    counts: Counts = field(default_factory=Counts)
    """Counted since the round's last step."""


class EvaluationRow(_RowInTime, frozen=True, kw_only=True):
    """One evaluation on held-out prompts."""

    accuracy: float = field(name="eval/accuracy")
    """Mean reward."""
    mean_tokens: float = field(name="eval/mean_tokens")
    num_samples: int = field(name="eval/num_samples")
    sets: dict[str, float] = field(name="eval", default_factory=dict)
    """avg@n and pass@k of each named data source; of `all` where a prompt has several samples."""


class ClosingRow(_RowInTime, frozen=True, kw_only=True):
    """What was counted after the last step or round."""

    counts: Counts


Row = StepRow | RoundRow | EvaluationRow | ClosingRow


def to_json(row: Row) -> dict[str, float | None]:
    """The row as one flat object. What is None is left out; what is not finite stays (msgspec writes
    null)."""
    tree = msgspec.to_builtins(row, str_keys=True)
    counts = tree.pop("counts", {})
    if isinstance(row, RoundRow):
        del tree["round"], tree["bound"]
        tree = {"round": tree}
    return dict(_leaves(tree, "")) | dict(_leaves(counts, ""))


def from_json(flat: Mapping[str, float | None]) -> list[Row]:
    """The rows that were written as one object: a step and its round's end share one."""
    counts = _parse(flat, Counts)
    if "eval/accuracy" in flat:
        return [_parse(flat, EvaluationRow)]
    if "loss" not in flat:
        return [_parse(flat, ClosingRow, counts=counts)]
    rows: list[Row] = [_parse(flat, StepRow, counts=counts)]
    end = {key.removeprefix("round/"): value for key, value in flat.items() if key.startswith("round/")}
    if end:
        rows.append(_parse(end, RoundRow, round=flat["round"]))
    return rows


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        elif value is not None:
            yield prefix + key, value


def _parse(flat: Mapping[str, float | None], kind: type[S], **more: object) -> S:
    """A struct from those keys of a flat object that are its own."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    nested = [key for key, of in fields.items() if get_origin(of) is dict or of is LengthStats]
    tree: dict[str, Any] = dict(more)
    for key, value in flat.items():
        value = nan if value is None and fields.get(key) is float else value
        if key in fields:
            tree[key] = value
            continue
        for name in nested:
            if key.startswith(f"{name}/"):
                tree.setdefault(name, {})[key.removeprefix(f"{name}/")] = value
    return msgspec.convert(tree, kind, strict=False, str_keys=True)
