"""RollPacker: the reward scheduler, the stream trainer and the scalability (sections 6.5 to 6.7)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from reproductions.base import Figure, Table
from reproductions.rollpacker_judge import RESIDENT
from reproductions.rollpacker_runs import (
    ETA,
    LARGE,
    MEDIUM,
    MODELS,
    PERIOD,
    REWARDS,
    SEEDS,
    SMALL,
    TAIL_BATCHING,
    TRAINER,
    VERL,
    Variant,
    long_rounds,
    rollpacker_of,
    run,
    speed,
    tailbatch_of,
)
from tailrace.controller.run import Run
from tailrace.record.figures import Row
from tailrace.schedules import Schedule
from tailrace.schedules.tailbatch import next_round
from tailrace.sim.judge import ForwardPass, forward_pass
from tailrace.types import Group

SCALED = Variant(rollpacker_of, asynchronous=True, placement="elastic")
"""The stream trainer (section 6.6)."""
FETCHED = {0.2: 128.6, 0.3: 129.5, 0.4: 133.8, 0.5: 132.0}
"""Step time in seconds by the largest share that is fetched (Table 4)."""
STEP_S, UNSCALED_STEP_S = 115.2, 124.2
"""Of the stream trainer (Tables 3 and 4), and without GPU scaling (Table 3)."""
LENGTHS = (8_192, 16_384, 32_768)
"""Of the longest responses (Fig. 13b)."""
SIZES = (1, 2, 4)
"""Of the batch and of the devices (Fig. 14)."""


def table_3() -> Table:
    """GPU scaling of the stream trainer in long rounds."""
    without, scaled = (_long_s(each) for each in (replace(SCALED, placement="colocated"), SCALED))
    figures = (
        Figure("without GPU scaling", "step time", "s", UNSCALED_STEP_S, without, "predicted"),
        Figure("adaptive GPU scaling", "step time", "s", STEP_S, scaled, "predicted"),
        Figure("adaptive GPU scaling", "speed-up", "x", 1.08, without / scaled, "predicted"),
    )
    return Table("Table 3", "long rounds of Qwen2.5-7B/8k, Math", figures)


def table_4() -> Table:
    """One fetch against the stream trainer in long rounds."""
    streamed, figures = _long_s(SCALED), []
    for share, printed in FETCHED.items():
        ours = streamed / _long_s(replace(SCALED, schedule=partial(_fetching, share=share)))
        name = f"one fetch, at most {share:.0%}"
        figures.append(Figure(name, "speed against streaming", "x", STEP_S / printed, ours, "predicted"))
    notes = (
        "The fetch takes the prompts that are complete when half of the devices begin to train. The others"
        " are trained after the rollout.",
    )
    return Table(
        "Table 4", "asynchronous fetching, long rounds of Qwen2.5-7B/8k, Math", tuple(figures), notes
    )


def _fetching(groups: int, share: float) -> Schedule:
    return partial(fetch_once, groups_per_round=groups, share=share)


async def fetch_once(run: Run, groups_per_round: int, share: float) -> None:
    """The stream trainer, but complete groups are fetched once while the rollout goes on (section 6.6).

    Args:
        share: of the round's groups, at most, that are fetched.
    """
    run.promise(staleness=0)
    async for _ in run.rounds(while_parked=True):
        groups = next_round(run, groups_per_round, ETA, ETA)
        run.pool.launch(groups)
        num = min(groups_per_round, len(groups))
        room, fetches = int(share * num), 0
        left: list[Group] = []
        async for batch in run.pool.race(num):
            # The first waits until devices train, the second has what was completed until then.
            taken = batch[:room] if fetches < 2 else []
            fetches, room = fetches + 1, room - len(taken)
            left += batch[len(taken) :]
            await run.accumulate(taken)
        await run.accumulate(left)
        await run.step()
        await run.publish()


def _long_s(variant: Variant) -> float:
    return _seconds(long_rounds(run(SMALL, variant, ("Math",))))


def _seconds(rounds: Sequence[Row]) -> float:
    return fmean(row["round/time_s"] for row in rounds)


def seconds_in_turn(forward: ForwardPass, tokens: int) -> float:
    """The time of a response if a layer is copied when it is called."""
    num = forward.budget.num_layers
    copied = num - forward.budget.resident_layers(tokens)
    return num * forward.layer_s(1, tokens) + copied * forward.copy_s


def figure_13() -> Table:
    """The judge on the devices of the engines."""
    times = {
        sharing: run(SMALL, replace(REWARDS, sharing=sharing), ("LLM-as-a-Judge",), PERIOD).rounds
        for sharing in ("time slices", "mps")
    }
    gains = [
        slices["round/time_s"] / mps["round/time_s"]
        for slices, mps in zip(times["time slices"], times["mps"], strict=True)
    ]
    figures = [Figure(f"13a, {SMALL}", "step time, MPS, at most", "x", 1.25, max(gains), "predicted")]
    forward = forward_pass(LARGE.sim("mps"))
    for tokens in LENGTHS:
        ours = seconds_in_turn(forward, tokens) / forward.seconds(1, tokens)
        printed = 1.4 if tokens == LENGTHS[-1] else None
        what = "reward time, pipelined, speed-up"
        figures.append(Figure(f"13b, {tokens} tokens", what, "x", printed, ours, "derived"))
    notes = (
        "Without MPS judge and actor compute in turn; with it they divide the arithmetic units.",
        f"13b: one response, and memory for {RESIDENT:.0%} of the layers at {LENGTHS[-1]} tokens.",
        "A judge takes one forward pass. The paper does not say how long its answers are.",
    )
    return Table("Fig. 13", "LLM-as-a-Judge on the devices of the engines", tuple(figures), notes)


def figure_14() -> Table:
    """Larger batches on as many more devices."""
    figures, last = [], 0.0
    for size in SIZES:
        model = replace(MEDIUM, devices=size * MEDIUM.devices, groups=size * MEDIUM.groups)
        name = f"{model.devices} GPUs, batch {model.groups}"
        ours = speed(run(model, TRAINER, rounds=PERIOD))
        gain = ours / speed(run(model, VERL, rounds=2))
        figures.append(Figure(name, "throughput", "samples/s", None, ours, "predicted"))
        figures.append(Figure(name, "throughput over veRL", "x", 2.2, gain, "predicted"))
        if last:
            figures.append(Figure(name, "throughput of that at half", "x", 1.5, ours / last, "predicted"))
        last = ours
    notes = (f"{PERIOD} rounds of RollPacker, and 2 of veRL.",)
    return Table("Fig. 14", str(MEDIUM), tuple(figures), notes)


def section_6_5() -> Table:
    """The reward scheduler."""
    figures, asynchronous = [], Variant(tailbatch_of, asynchronous=True)
    for model, printed in zip(MODELS, (1.48, 1.35, 1.18), strict=True):
        ratio = speed(run(model, asynchronous)) / speed(run(model, TAIL_BATCHING))
        figures.append(Figure(str(model), "asynchronous rewards, speed-up", "x", printed, ratio, "predicted"))
    fixed, adaptive = (
        fmean(
            row["round/wait_s"]
            for seed in SEEDS
            for row in run(SMALL, variant, ("Code",), PERIOD, seed).rounds
        )
        for variant in (asynchronous, REWARDS)
    )
    row, what = f"{SMALL}, Code", "adaptive timeout: rollout and rewards, speed-up"
    figures.append(Figure(row, what, "x", 1.6, fixed / adaptive, "predicted"))
    note = f"Adaptive timeout: mean of {len(SEEDS)} seeds."
    return Table("Section 6.5", "reward scheduler", tuple(figures), (note,))
