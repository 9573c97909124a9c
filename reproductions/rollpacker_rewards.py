"""RollPacker's reward scheduler (sections 4.3 and 6.5), and where its printed factors hold."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from reproductions.base import Figure, Table
from reproductions.rollpacker_judge import RESIDENT, judge_of
from reproductions.rollpacker_runs import (
    LARGE,
    MODELS,
    NO_TIME,
    PERIOD,
    PROMPT_TOKENS,
    REWARDS,
    SMALL,
    TAIL_BATCHING,
    TASKS,
    Programs,
    Variant,
    run,
    speed,
    tailbatch_of,
)
from tailrace.extras.judges.simulated import ForwardPass, forward_pass

ASYNCHRONOUS = Variant(tailbatch_of, asynchronous=True)
SOLVED = Programs(solvable=(4.0, 4.0))
"""One prompt in 300 has no correct response among eight; of U-shaped solve rates, as assumed, one in five."""
PROGRAMS: Mapping[str, Programs] = {
    "cases of 1 s": Programs(median_s=1.0),
    "64 workers": Programs(workers=64),
    "anchors that are learnt": Programs(referenced=False),
    "the same, prompts with solutions": replace(SOLVED, referenced=False),
    "the same, second epoch": replace(SOLVED, referenced=False, rows=512),
}
LENGTHS = (8_192, 16_384, 32_768)
"""Of the longest responses (Fig. 13b)."""
COPIES = ((RESIDENT, 1.0), (RESIDENT, 0.25), (0.0, 1.0), (0.0, 0.5))
"""Share of the judge's layers that stay on the device, and share of the link's rate."""


def section_6_5(seed: int) -> Table:
    """The reward scheduler on the mix of tasks."""
    figures = []
    solved = replace(REWARDS, programs=SOLVED)
    reserved = replace(TAIL_BATCHING, reserved=True)
    for model, printed in zip(MODELS, (1.48, 1.35, 1.18), strict=True):
        before = speed(run(model, TAIL_BATCHING, seed=seed))
        ratio, free, whole, anchored, quarter = (
            speed(run(model, variant, tasks, seed=seed)) / before
            for variant, tasks in (
                (ASYNCHRONOUS, TASKS),
                (TAIL_BATCHING, NO_TIME),
                (REWARDS, TASKS),
                (solved, TASKS),
                (reserved, TASKS),
            )
        )
        figures.append(Figure(str(model), "asynchronous rewards, speed-up", "x", printed, ratio))
        for what, ours in (
            ("rewards of no time", free),
            ("all of + reward", whole),
            ("all of + reward, prompts with solutions", anchored),
            ("all of + reward, over a judge on a quarter of the devices", whole / quarter),
        ):
            figures.append(Figure(str(model), f"{what}, speed-up", "x", None, ours))
    notes = (
        "Rewards of no time bound what a scheduler gains, unless it also frees devices: a judge with devices"
        " of its own (section 4.3 names 25%) leaves fewer for rollout and training. Against that baseline"
        " all of + reward gains about what Table 2 prints: 1.55x, 1.35x and 1.12x.",
    )
    return Table("Section 6.5", "reward scheduler", tuple(figures), notes)


def figure_13a(seed: int) -> Table:
    """MPS against time slices."""
    slices, mps = (
        run(SMALL, replace(REWARDS, sharing=sharing), TASKS[2:], PERIOD, seed).rounds
        for sharing in ("time slices", "mps")
    )
    gains = [one["round/time_s"] / other["round/time_s"] for one, other in zip(slices, mps, strict=True)]
    row = "a score from one pass"
    figures = (
        Figure(row, "step time, MPS, at most", "x", 1.25, max(gains)),
        Figure(row, "step time, MPS, short rounds", "x", None, fmean(gains[:-1])),
    )
    notes = (
        "Without MPS judge and actor compute in turn; with it they divide the arithmetic units.",
        "The judge of the published code writes one token.",
    )
    return Table("Fig. 13a", f"LLM-as-a-Judge on the devices of the engines, {SMALL}", figures, notes)


def seconds_in_turn(forward: ForwardPass, tokens: int) -> float:
    """The time of a response if a layer is copied when it is called."""
    num = forward.budget.num_layers
    copied = num - forward.budget.resident_layers(tokens)
    return num * forward.layer_s(1, tokens) + copied * forward.copy_s


def figure_13b(seed: int) -> Table:
    """Copies that overlap with computation. Nothing is drawn, so the seed changes nothing."""
    sim, figures = LARGE.sim("mps"), []
    for resident, link in COPIES:
        rewards = sim.rewards.changed(judge=judge_of(PROMPT_TOKENS + LENGTHS[-1], resident=resident))
        whole = forward_pass(sim.changed(rewards=rewards))
        forward = replace(whole, copy_s=whole.copy_s / link)
        for tokens in LENGTHS:
            ours = seconds_in_turn(forward, tokens) / forward.seconds(1, tokens)
            is_printed = tokens == LENGTHS[-1] and (resident, link) == COPIES[0]
            row = f"{tokens} tokens, {1 - resident:.0%} copied, {link:.0%} of the link"
            printed = 1.4 if is_printed else None
            figures.append(Figure(row, "reward time, pipelined, speed-up", "x", printed, ours))
    layer_s, copy_s = forward.layer_s(1, LENGTHS[-1]), forward_pass(sim).copy_s
    notes = (
        f"One response. At {LENGTHS[-1]} tokens a layer computes for {1e3 * layer_s:.0f} ms and is copied in"
        f" {1e3 * copy_s:.0f} ms. So 1.4x with half of the layers copied needs copies at less than a"
        " quarter of the link's rate, or all layers copied at less than half of it.",
        "The published code runs this figure with all layers copied, and one token written.",
    )
    return Table("Fig. 13b", "layers of the judge that are copied", tuple(figures), notes)


def figure_13c(seed: int) -> Table:
    """Rollout and rewards of programs, with a fixed and an adaptive timeout."""
    figures, what = [], "adaptive timeout: rollout and rewards, speed-up"
    for row, programs in {"as assumed": Programs(), **PROGRAMS}.items():
        rounds = 2 * PERIOD if programs.rows else PERIOD
        fixed_s, adaptive_s = (
            fmean(_waits_s(replace(variant, programs=programs), rounds, seed))
            for variant in (ASYNCHRONOUS, REWARDS)
        )
        ours, printed = fixed_s / adaptive_s, None if row in PROGRAMS else 1.6
        # The rule of the limit was read in the published code after the row had been seen.
        figures.append(Figure(row, what, "x", printed, ours, "determined" if printed else "predicted"))
    notes = (
        "In the published code the limit is twice the reference time of the row, at least 2 s and at most"
        " 30 s, from the first response on. Where the anchor is a correct response to the same prompt, as the"
        " paper says, a prompt without one keeps the 30 s, and a short round waits for it: the printed factor"
        " then needs that nearly every prompt is solved.",
    )
    return Table("Fig. 13c", f"adaptive timeout, {SMALL}, Code", tuple(figures), notes)


def _waits_s(variant: Variant, rounds: int, seed: int) -> list[float]:
    """Seconds of rollout and rewards in each round of the last period, of programs alone."""
    return [row["round/wait_s"] for row in run(SMALL, variant, TASKS[1:2], rounds, seed).rounds[-PERIOD:]]
