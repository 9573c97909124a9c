"""RollPacker (Gao et al. 2025): the ablation of its three models, Table 2, and what else it prints.

The set-ups are in `rollpacker_runs.py`. Sections 6.5 to 6.7 are in `rollpacker_parts.py`.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean, harmonic_mean

from reproductions import rollpacker_parts as parts
from reproductions import rollpacker_planner as planner
from reproductions.base import Figure, Kind, Paper, Table
from reproductions.rollpacker_runs import (
    LARGE,
    MEDIAN_OF_LIMIT,
    MEDIUM,
    MODELS,
    PERIOD,
    PLANNER,
    REWARDS,
    ROUND_S,
    ROUNDS,
    SEEDS,
    SIGMA,
    SMALL,
    TAIL_BATCHING,
    TASKS,
    TRAINER,
    TRAINING_EFFICIENCY,
    VERL,
    Model,
    Variant,
    growing_rollouts,
    rollout_s,
    run,
    short_rounds,
    speed,
    tailbatch_of,
)
from tailrace.record.figures import Row
from tailrace.schedules import Schedule
from tailrace.schedules.tailbatch import tailbatch

SHARES = {"Math": (72, 5, 23), "Code": (66, 13, 21), "LLM-as-a-Judge": (71, 7, 22)}
"""Rollout, reward and training, in % (Table 1)."""
ABLATION = {
    SMALL: (1.30, 2.01, 2.01, 2.03),
    MEDIUM: (1.48, 1.99, 2.02, 2.22),
    LARGE: (2.21, 2.48, 2.52, 2.56),
}
"""Speed-ups over veRL (Table 2)."""
PARTS = {
    "+ tail batching": TAIL_BATCHING,
    "+ reward": REWARDS,
    "+ parallelism": PLANNER,
    "+ trainer": TRAINER,
}
SPECULATION = {
    "responses 1.25": (1, 1.25),
    "responses 1.5": (1, 1.5),
    "prompts 1.25": (1.25, 1),
    "prompts 1.5": (1.5, 1),
}
"""Factors of prompts and responses (Fig. 11)."""
LIMITS = (*range(8_192, 32_768, 1_024), 32_768)
"""Length limits of section 6.4."""
FIRST = 4
"""Rounds of Table 1."""


def table_1() -> Table:
    """Shares of the stages with veRL, for each task."""
    figures = []
    for task in TASKS:
        kind: Kind = "predicted" if task == "Code" else "fitted"
        simulated = run(MEDIUM, VERL, (task,), FIRST)
        training = sum(row["round/trainer_compute_s"] for row in simulated.rounds)
        reward = sum(row["round/wait_s"] - (row.get("round/rollout_time_s", 0.0)) for row in simulated.rounds)
        ours = [100 * seconds / simulated.seconds for seconds in (reward, training)]
        for what, printed, share, what_kind in zip(
            ("rollout", "reward", "training"),
            SHARES[task],
            (100 - sum(ours), *ours),
            (kind, kind, "fitted"),
            strict=True,
        ):
            figures.append(Figure(task, what, "%", printed, share, what_kind))
    note = "The seconds that a round takes beside its stages count as rollout."
    return Table("Table 1", "stages of a step, veRL, Qwen2.5-14B/16k", tuple(figures), (note,))


def table_2() -> Table:
    """The ablation."""
    figures = []
    for model, speedups in ABLATION.items():
        kind: Kind = "fitted" if model == SMALL else "predicted"
        seeds = SEEDS if model == SMALL else (0,)
        before = _speed(model, VERL, seeds)
        for (part, variant), printed in zip(PARTS.items(), speedups, strict=True):
            ours = _speed(model, variant, seeds) / before
            figures.append(Figure(str(model), part, "x", printed, ours, kind, tolerance=0.15 * printed))
    notes = (
        "No engine preempts a request, so the planner changes nothing.",
        f"{SMALL}: mean of {len(SEEDS)} seeds, because the rounds of ten are few programs that never end.",
        "From + reward on a judge shares the devices of the engines with MPS, and its times follow from the"
        " devices; before, they are those fitted to Table 1.",
    )
    return Table("Table 2", "speed-up over veRL, each part added to those above", tuple(figures), notes)


def _speed(model: Model, variant: Variant, seeds: Sequence[int]) -> float:
    return harmonic_mean(speed(run(model, variant, seed=seed)) for seed in seeds)


def figure_9() -> Table:
    """Short and long rounds."""
    figures = []
    for model in MODELS:
        before, after = run(model, VERL), run(model, TRAINER)
        ratio = _seconds(before.rounds) / _seconds(short_rounds(after))
        figures.append(
            Figure(str(model), "short rounds, speed-up over veRL", "x", (2.1, 3.6), ratio, "predicted")
        )
    before, after = run(MEDIUM, VERL, ("Code",), PERIOD), run(MEDIUM, TAIL_BATCHING, ("Code",), PERIOD)
    shorter = max(
        one["round/completions/max_length"] / other["round/completions/max_length"]
        for one, other in zip(before.rounds, short_rounds(after), strict=False)
    )
    figures.append(
        Figure(f"{MEDIUM}, Code", "longest response, at most shorter", "x", 8.9, shorter, "predicted")
    )
    before, after = run(LARGE, VERL), run(LARGE, TAIL_BATCHING)
    faster = max(
        one.get("round/rollout_time_s", 0.0) / other.get("round/rollout_time_s", 1.0)
        for one, other in zip(before.rounds, after.rounds, strict=True)
    )
    figures.append(
        Figure(str(LARGE), "rollout of a short round, at most faster", "x", 7.8, faster, "predicted")
    )
    notes = ("The longest responses are those of Fig. 4a, the rollouts those of Fig. 10b.",)
    return Table("Fig. 9", "short rounds", tuple(figures), notes)


def figure_11() -> Table:
    """The speculation factor eta, for prompts and for responses."""
    before = rollout_s(run(LARGE, Variant(asynchronous=True), rounds=PERIOD))
    ours = before / rollout_s(run(LARGE, Variant(tailbatch_of, asynchronous=True), rounds=PERIOD))
    alone = {name: before / _rollout_s(*factors) for name, factors in SPECULATION.items()}
    prompts, responses = alone["prompts 1.25"], alone["responses 1.25"]
    figures = (
        *(Figure(name, "rollout, speed-up", "x", None, each, "predicted") for name, each in alone.items()),
        Figure("both 1.25", "rollout, speed-up", "x", 3.9, ours, "predicted"),
        Figure("both 1.25", "over P = P0", "x", 1.5, ours / responses, "predicted"),
        Figure("both 1.25", "over R = R0", "x", 1.6, ours / prompts, "predicted"),
    )
    notes = ("The printed numbers are the largest of three models.",)
    return Table("Fig. 11", f"speculation, {LARGE}", figures, notes)


def _rollout_s(prompts: float, responses: float) -> float:
    def schedule(groups: int) -> Schedule:
        return partial(
            tailbatch, groups_per_round=groups, prompt_speculation=prompts, response_speculation=responses
        )

    return rollout_s(run(LARGE, Variant(schedule, asynchronous=True), rounds=PERIOD))


def figure_12() -> Table:
    """The parallelism planner under a growing length limit."""
    fixed, planned = (growing_rollouts(LIMITS, width).seconds for width in (1, 4))
    figure = Figure("8k to 32k", "rollout, speed-up", "x", 1.9, fixed / planned, "predicted")
    notes = ("Lengths grow with the limit: their median is 15% of it and sigma is 1, which is assumed.",)
    return Table("Fig. 12a", "planner against TP 1, Qwen2.5-14B on 16 GPUs", (figure,), notes)


def _seconds(rounds: Sequence[Row]) -> float:
    return fmean(row["round/time_s"] for row in rounds)


PAPER = Paper(
    name="rollpacker",
    citation="Gao et al. 2025, RollPacker: Mitigating Long-Tail Rollouts for Fast, Synchronous RL"
    " Post-Training",
    set_up=(
        "16, 32 and 64 H800 for Qwen2.5-7B, 14B and 32B with at most 8k, 16k and 32k tokens; engines of 1, 2"
        " and 2 devices; P0 = 128, R0 = 8, eta = 1.25; all devices generate and train in turn.",
        "One derivation for the three models: rates follow from the devices, with 60% of the memory for"
        f" engines. Lengths are lognormal: the median is {MEDIAN_OF_LIMIT:.3f} of the limit (the longest"
        f" response is 25 to 32 times as long), sigma is {SIGMA} (75th percentile of Code). A deferred prompt"
        " has the same lengths again.",
        f"Fitted to Table 1: training reaches {TRAINING_EFFICIENCY:.1%} of the devices' FLOP/s, and the times"
        " of the rewards for Math and of the judge. The share of programs that never end and their limit of"
        " 30 s are printed.",
        f"Fitted to the four rows of Qwen2.5-7B in Table 2: each round takes {ROUND_S:.0f} s beside its"
        " stages.",
        "From + reward on a judge of 7B shares each device with an engine by MPS. It scores with one forward"
        " pass, and half of its layers are copied from the host at the longest response.",
        f"{ROUNDS} rounds: two periods of four short rounds and a long one.",
    ),
    tables={
        "Table 1": table_1,
        "Table 2": table_2,
        "Table 3": parts.table_3,
        "Table 4": parts.table_4,
        "Fig. 6": planner.figure_6,
        "Fig. 9": figure_9,
        "Fig. 11": figure_11,
        "Fig. 12a": figure_12,
        "Fig. 12b": planner.figure_12bc,
        "Fig. 13": parts.figure_13,
        "Fig. 14": parts.figure_14,
        "Section 6.5": parts.section_6_5,
    },
    num_fitted=7,
    contradictions=(
        "Section 6.5 has 1.18x for asynchronous rewards alone with Qwen2.5-32B; in Table 2 all parts of the"
        " reward scheduler together add 2.48 / 2.21 = 1.12x.",
        "Section 6.2 calls 2.02x to 2.22x an improvement of 20%, 1.30x to 2.01x one of 71% and 2.21x to 2.48x"
        " one of 27%; they are 10%, 55% and 12%.",
        "Section 3 measures 1.48x for tail batching on the code data set; Table 2 has the same number for the"
        " mix of three tasks.",
        "The copies of the judge's layers impose little overhead in section 4.3, and a substantial one in"
        " section 6.5.",
        "Section 6.4 raises the length limit by 1k a step; the caption of Fig. 12 by 2k.",
    ),
)
