"""RollPacker (Gao et al. 2025): the ablation of its three models, Table 2, and what else it prints.

The set-ups are in `rollpacker_runs.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from reproductions import rollpacker_planner as planner
from reproductions import rollpacker_rewards as rewards
from reproductions.base import Figure, Kind, Paper, Table, parameters
from reproductions.rollpacker_runs import (
    ETA,
    LARGE,
    MEDIUM,
    MODELS,
    PERIOD,
    PLANNER,
    REWARDS,
    ROUND_S,
    ROUNDS,
    SMALL,
    TAIL_BATCHING,
    TASKS,
    TRAINER,
    VERL,
    ScheduleOf,
    Variant,
    growing_rollouts,
    long_rounds,
    rollout_s,
    rollpacker_of,
    run,
    serial_of,
    short_rounds,
    speed,
    tailbatch_of,
)
from tailrace.controller.run import Run
from tailrace.record.events import Row
from tailrace.schedules.tailbatch import next_round, tailbatch
from tailrace.types import Group

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
SCALED = Variant(rollpacker_of, asynchronous=True, placement="elastic")
"""The stream trainer (section 6.6)."""
FETCHED = {0.2: 128.6, 0.3: 129.5, 0.4: 133.8, 0.5: 132.0}
"""Step time in seconds by the largest share that is fetched (Table 4)."""
STEP_S, UNSCALED_STEP_S = 115.2, 124.2
"""Of the stream trainer (Tables 3 and 4), and without GPU scaling (Table 3)."""
TRIGGERED = {0.2: 122.7, 0.3: 118.2, 0.4: 119.8}
"""Step time in seconds by the share of complete prompts at which the devices change hands (Table 3)."""
SLOWER = (2.0, 4.0)
"""Factors of the training time."""
SIZES = (1, 2, 4)
"""Of the batch and of the devices (Fig. 14)."""


def table_1(seed: int) -> Table:
    """Shares of the stages with veRL, for each task."""
    figures = []
    for task in TASKS:
        kind: Kind = "predicted" if task == "Code" else "fitted"
        simulated = run(MEDIUM, VERL, (task,), FIRST, seed)
        training = sum(row["round/trainer_compute_s"] for row in simulated.rounds)
        reward = sum(row["round/wait_s"] - (row.get("round/rollout_time_s", 0.0)) for row in simulated.rounds)
        stages = (reward, training, ROUND_S * len(simulated.rounds))
        ours = [100 * seconds / simulated.seconds for seconds in stages]
        figures += [
            Figure(task, "rollout", "%", SHARES[task][0], 100 - sum(ours), kind),
            Figure(task, "reward", "%", SHARES[task][1], ours[0], kind),
            Figure(task, "training", "%", SHARES[task][2], ours[1], "fitted"),
            Figure(task, "unexplained", "%", None, ours[2], "fitted"),
        ]
    note = f"Unexplained: {ROUND_S:g} s of a round beside its stages, fitted to Table 2."
    return Table("Table 1", "stages of a step, veRL, Qwen2.5-14B/16k", tuple(figures), (note,))


def table_2(seed: int) -> Table:
    """The ablation."""
    figures = []
    for model, printed in ABLATION.items():
        kind: Kind = "fitted" if model == SMALL else "predicted"
        runs = [run(model, variant, seed=seed) for variant in (VERL, *PARTS.values())]
        ours, row = [speed(each) / speed(runs[0]) for each in runs], str(model)
        for part, paper, our in zip(PARTS, printed, ours[1:], strict=True):
            figures.append(Figure(row, part, "x", paper, our, kind, 0.15 * paper))
        pairs = zip(PARTS, pairwise((1.0, *printed)), pairwise(ours), strict=True)
        for part, (low, high), (before, after) in list(pairs)[1:]:
            own, what = high / low, f"{part}, its own factor"
            figures.append(Figure(row, what, "x", own, after / before, "determined", 0.15 * own))
        explained = [1 - ROUND_S * len(each.rounds) / each.seconds for each in runs]
        what = f"all parts, without the {ROUND_S:g} s"
        figures.append(Figure(row, what, "x", None, ours[-1] * explained[0] / explained[-1]))
    notes = (
        "A part's own factor is the ratio of its row and the one above, in the paper and here.",
        "The own factor of + reward at 7B is too small: an adaptive timeout cuts little while a fifth of the"
        " prompts has no correct response (Fig. 13c), and rewards take too little of a round (section 6.5).",
        "No engine preempts requests, so the planner changes nothing; in Figs. 6 and 12b they do.",
        "From + reward on a judge shares the devices of the engines with MPS, and its times follow from the"
        " devices; before, they are those fitted to Table 1.",
    )
    return Table("Table 2", "speed-up over veRL, each part added to those above", tuple(figures), notes)


def table_3(seed: int) -> Table:
    """GPU scaling of the stream trainer in long rounds."""
    without = _long_s(replace(SCALED, placement="colocated"), seed)
    figures = [Figure("without GPU scaling", "step time", "s", UNSCALED_STEP_S, without)]
    fixed = {
        f"at {share:.0%} of the prompts": (triggered(share), printed) for share, printed in TRIGGERED.items()
    }
    for row, (schedule, printed) in {**fixed, "adaptive": (SCALED.schedule, STEP_S)}.items():
        ours = _long_s(replace(SCALED, schedule=schedule), seed)
        figures.append(Figure(row, "step time", "s", printed, ours))
        figures.append(Figure(row, "speed-up", "x", UNSCALED_STEP_S / printed, without / ours, "determined"))
    # The rule was read in the published code after the row above had been seen.
    row, ours = "adaptive, as in the published code", _long_s(replace(SCALED, by_prompts=True), seed)
    figures.append(Figure(row, "step time", "s", STEP_S, ours, "determined"))
    notes = (
        "The adaptive criterion counts responses. Half of them have ended when the first prompt is complete,"
        " and the KV cache fits, so the devices change hands at once: it is the earliest of the triggers.",
        "The published code waits for 40% of the prompts, or 50% after a round without a response near the"
        " limit, and does not look at the KV cache.",
    )
    return Table("Table 3", "long rounds of Qwen2.5-7B/8k, Math", tuple(figures), notes)


def table_4(seed: int) -> Table:
    """One fetch against the stream trainer in long rounds."""
    figures = []
    for slower in (1.0, *SLOWER):
        scaled = replace(SCALED, slower=slower)
        streamed = _long_s(scaled, seed)
        for share, printed in FETCHED.items():
            ours = streamed / _long_s(replace(scaled, schedule=fetching(share)), seed)
            row = f"one fetch of {share:.0%}" + (f", training {slower:g} times as long" if slower > 1 else "")
            speed = STEP_S / printed if slower == 1 else None
            figures.append(Figure(row, "speed against streaming", "x", speed, ours))
    notes = (
        "The paper caps a single fetch at this share. Here few of 128 prompts are complete when half of the"
        " devices begin to train, so no cap would bind: the fetch waits until its share is complete.",
        "Half of the devices train any of the shares before the rollout ends, so a larger fetch hides more."
        " A smaller one is faster where they train longer than the rollout lasts, as with training four"
        " times as long. But then one fetch costs 1%, not 10 to 14%. No ratio of training and rollout"
        " gives both: in the paper one fetch has a cost that it does not name.",
    )
    return Table("Table 4", "one fetch, long rounds of Qwen2.5-7B/8k, Math", tuple(figures), notes)


def triggered(share: float) -> ScheduleOf:
    return lambda groups: partial(scale_at, groups_per_round=groups, share=share)


async def scale_at(run: Run, groups_per_round: int, share: float) -> None:
    """The stream trainer, but devices change hands when this share of prompts is complete (section 6.6)."""
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        groups = next_round(run, groups_per_round, ETA, ETA)
        run.pool.launch(groups)
        num = min(groups_per_round, len(groups))
        waiting, num_complete = list[Group](), 0
        async for batch in run.pool.race(num):
            waiting, num_complete = waiting + batch, num_complete + len(batch)
            if num_complete >= share * num:
                await run.accumulate(waiting)
                waiting = []
        await run.step()
        await run.publish()


def fetching(share: float) -> ScheduleOf:
    return lambda groups: partial(fetch_once, groups_per_round=groups, share=share)


async def fetch_once(run: Run, groups_per_round: int, share: float) -> None:
    """The stream trainer, but complete groups are fetched once while the rollout goes on (section 6.6).

    Args:
        share: of the round's groups that are fetched, once so many are complete.
    """
    run.declare(staleness=0)
    async for _ in run.rounds(while_parked=True):
        groups = next_round(run, groups_per_round, ETA, ETA)
        run.pool.launch(groups)
        num = min(groups_per_round, len(groups))
        to_fetch, left = int(share * num), list[Group]()
        async for batch in run.pool.race(num):
            left += batch
            if 0 < to_fetch <= len(left):
                fetched, left, to_fetch = left[:to_fetch], left[to_fetch:], 0
                await run.accumulate(fetched)
        await run.accumulate(left)
        await run.step()
        await run.publish()


def _long_s(variant: Variant, seed: int) -> float:
    return fmean(row["round/time_s"] for row in long_rounds(run(SMALL, variant, ("Math",), seed=seed)))


def figure_9(seed: int) -> Table:
    """Short and long rounds."""
    figures = []
    for model in MODELS:
        before, after = run(model, VERL, seed=seed), run(model, TRAINER, seed=seed)
        ratio = _seconds(before.rounds) / _seconds(short_rounds(after))
        figures.append(Figure(str(model), "short rounds, speed-up over veRL", "x", (2.1, 3.6), ratio))
    before, after = (run(MEDIUM, each, ("Code",), PERIOD, seed) for each in (VERL, TAIL_BATCHING))
    pairs, length = zip(before.rounds, short_rounds(after), strict=False), "round/completions/max_length"
    shorter = max(one[length] / other[length] for one, other in pairs)
    figures.append(Figure(f"{MEDIUM}, Code", "longest response, at most shorter", "x", 8.9, shorter))
    rollouts = (
        [row.get("round/rollout_time_s", 0.0) for row in run(LARGE, each, seed=seed).rounds]
        for each in (VERL, TAIL_BATCHING)
    )
    faster = max(one / other for one, other in zip(*rollouts, strict=True))
    figures.append(Figure(str(LARGE), "rollout of a short round, at most faster", "x", 7.8, faster))
    notes = ("The longest responses are those of Fig. 4a, the rollouts those of Fig. 10b.",)
    return Table("Fig. 9", "short rounds", tuple(figures), notes)


def figure_11(seed: int) -> Table:
    """The speculation factor eta, for prompts and for responses."""

    def seconds(schedule: ScheduleOf) -> float:
        return rollout_s(run(LARGE, Variant(schedule, asynchronous=True), rounds=PERIOD, seed=seed))

    def raced(prompts: float, responses: float) -> ScheduleOf:
        eta = partial(tailbatch, prompt_speculation=prompts, response_speculation=responses)
        return lambda groups: partial(eta, groups_per_round=groups)

    before = seconds(serial_of)
    ours = before / seconds(tailbatch_of)
    alone = {name: before / seconds(raced(*factors)) for name, factors in SPECULATION.items()}
    prompts, responses = alone["prompts 1.25"], alone["responses 1.25"]
    figures = (
        *(Figure(name, "rollout, speed-up", "x", None, each) for name, each in alone.items()),
        Figure("both 1.25", "rollout, speed-up", "x", 3.9, ours),
        Figure("both 1.25", "over P = P0", "x", 1.5, ours / responses),
        Figure("both 1.25", "over R = R0", "x", 1.6, ours / prompts),
    )
    notes = ("The printed numbers are the largest of three models.",)
    return Table("Fig. 11", f"speculation, {LARGE}", figures, notes)


def figure_12(seed: int) -> Table:
    """The parallelism planner under a growing length limit."""
    fixed, planned = (growing_rollouts(LIMITS, width, seed).seconds for width in (1, 4))
    figure = Figure("8k to 32k", "rollout, speed-up", "x", 1.9, fixed / planned)
    note = "The rounds are those of `serial`. Assumed: the median length is 15% of the limit, sigma is 1."
    return Table("Fig. 12a", "planner against TP 1, Qwen2.5-14B on 16 GPUs", (figure,), (note,))


def figure_14(seed: int) -> Table:
    """Larger batches on as many more devices."""
    figures, last = [], 0.0
    for size in SIZES:
        model = replace(MEDIUM, devices=size * MEDIUM.devices, groups=size * MEDIUM.groups)
        name = f"{model.devices} GPUs, batch {model.groups}"
        ours = speed(run(model, TRAINER, rounds=PERIOD, seed=seed))
        gain = ours / speed(run(model, VERL, rounds=2, seed=seed))
        figures.append(Figure(name, "throughput", "samples/s", None, ours))
        figures.append(Figure(name, "throughput over veRL", "x", 2.2, gain))
        if last:
            figures.append(Figure(name, "throughput of that at half", "x", 1.5, ours / last))
        last = ours
    notes = (f"{PERIOD} rounds of RollPacker, and 2 of veRL.",)
    return Table("Fig. 14", str(MEDIUM), tuple(figures), notes)


def _seconds(rounds: Sequence[Row]) -> float:
    return fmean(row["round/time_s"] for row in rounds)


PARAMETERS = """
printed 15 | 16, 32 and 64 H800 for Qwen2.5-7B, 14B and 32B with at most 8k, 16k and 32k tokens; engines of 1,
    2 and 2 devices; a trainer of TP 2, 2 and 4; P0 = 128, R0 = 8, eta = 1.25 | section 6
printed 4 | limits of 30 s for programs and 2 s for rules; 5% of the prompts have a program that never ends;
    half of the judge's layers are copied | sections 4.3, 5 and 6.5
fitted 2 | the median length is 1/29 of the limit, sigma is 1.05 | the longest response, 25 to 32 times as
    long as the median (section 1), and the 75th percentile of Code (section 2.2)
fitted 3 | training reaches 8.8% of the devices' FLOP/s; a reward of Math takes 0.3 s and one of the judge 0.8
    s | Table 1
fitted 1 | 25.5 s of a round beside its stages | the four rows of Qwen2.5-7B in Table 2
assumed 8 | 32, 256 and 64 reward workers; programs of 4 cases of 0.2 s; prompts of 200 tokens; engines with
    60% of the memory and 256 slots |
fitted 1 | Figs. 6 and 12b: the median length is 32% of the limit | the 87% of Fig. 6b
assumed 1 | Figs. 6 and 12b: sigma is 0.4 |
assumed 2 | Fig. 12a: the median is 15% of the limit, sigma is 1 |
"""
PAPER = Paper(
    name="rollpacker",
    citation="Gao et al. 2025, RollPacker: Mitigating Long-Tail Rollouts for Fast, Synchronous RL"
    " Post-Training",
    set_up=(
        "One derivation for the three models: rates follow from the devices, which all generate and train in"
        " turn. Lengths are lognormal; a deferred prompt has the same lengths again.",
        "From + reward on a judge of 7B shares each device with an engine by MPS and scores with one forward"
        " pass; half of its layers are copied from the host at the longest response.",
        f"{ROUNDS} rounds: two periods of four short rounds and a long one.",
    ),
    parameters=parameters(PARAMETERS),
    tables={
        "Table 1": table_1,
        "Table 2": table_2,
        "Table 3": table_3,
        "Table 4": table_4,
        "Fig. 6": planner.figure_6,
        "Fig. 9": figure_9,
        "Fig. 11": figure_11,
        "Fig. 12a": figure_12,
        "Fig. 12b": planner.figure_12bc,
        "Fig. 13a": rewards.figure_13a,
        "Fig. 13b": rewards.figure_13b,
        "Fig. 13c": rewards.figure_13c,
        "Fig. 14": figure_14,
        "Section 6.5": rewards.section_6_5,
    },
    contradictions=(
        "Section 6.5 has 1.18x for asynchronous rewards alone with Qwen2.5-32B; in Table 2 all parts of the"
        " reward scheduler together add 2.48 / 2.21 = 1.12x.",
        "Section 6.2 calls 2.02x to 2.22x an improvement of 20%, 1.30x to 2.01x one of 71% and 2.21x to 2.48x"
        " one of 27%; they are 10%, 55% and 12%.",
        "Section 3 measures 1.48x for tail batching on the code data set; Table 2 has the same number for the"
        " mix of three tasks.",
        "The copies of the judge's layers impose little overhead in section 4.3, and a substantial one in"
        " section 6.5.",
        "Rewards of no time give 1.24x at most after tail batching with Qwen2.5-14B: rewards take up to 0.13"
        " of a veRL step (Table 1), which takes 1 / 1.48 with tail batching; 0.68 / (0.68 - 0.13) = 1.24."
        " With the 22% of Fig. 4b it is 1.28x. Table 2 and section 6.5 print 1.35x.",
        "Section 6.4 raises the length limit by 1k a step; the caption of Fig. 12 by 2k.",
    ),
    not_attempted="Figs. 2b, 4b, 7, 8, 10a and 10c, RLHFuse as a second baseline, two of the three"
    " models of Fig. 11, the trainer's PP 2, CP 2 and CP 4 (14B, 32B).",
)
