"""Pairs that other projects printed: a synchronous run is fitted, its asynchronous counterpart is predicted.

    vime         github.com/vllm-project/vime, issue 358 (July 2026): Qwen3-4B, 2 + 2 Ascend A3
    verl 30B     verl, docs/advance/fully_async.md (February 2026): Qwen3-30B-A3B, 128 H20
    verl 7B      the same page, `use_trainer_do_validate`: Qwen2.5-Math-7B, 16 H20
    ReTool       the same page, Multi-Turn Tool Calling: Qwen2.5-7B, 32 H20
    fetches      the same page, `require_batches`: Qwen2.5-Math-7B, 128 H20
    one step     verl, docs/advance/one_step_off.md (July 2025): Qwen2.5-Math-7B, 16 H20
    UniRL        github.com/Tencent-Hunyuan/UniRL, pull request 213 (August 2026): 8,192 tokens, 18 rollouts
    SkyRL        SkyRL, docs/examples/spec_decode (2026): Qwen3.5-9B, 8 H100, a draft of three tokens
    Tinker       github.com/thinking-machines-lab/tinker-cookbook, pull request 822 (July 2026)

No page prints lengths. All pairs have one law, the simulator's default below the printed limit, and one form
of a decode step, the simulator's default, which a factor makes as long as the printed rollout.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

from reproductions.base import Figure, Kind, Paper, Table, parameters
from reproductions.verl import fully_async
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulation import Simulated, simulate
from tailrace.schedules import Schedule
from tailrace.schedules.one_step_off import one_step_off
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.serial import serial
from tailrace.schedules.windowed_fifo import tinker_async
from tailrace.sim.cluster import BYTES_PER_WEIGHT, UPDATE_S
from tailrace.sim.settings import SimClusterSettings, SimEngineSettings, SimSettings

SYNC_ROUNDS, ROUNDS, WARM_UP_ROUNDS = 3, 6, 2
MEDIAN, PROMPT = 1230.0, 150
"""Of the lengths, and the prompts, in tokens."""
UNSCALED, RATE = SimEngineSettings(), 1e5
"""A decode step and tokens a second, before they are fitted."""


class Trainer(NamedTuple):
    """Seconds of the trainer for the batch of a publication: of its passes, and of each optimizer step."""

    passes_s: float
    step_s: float = 0.0


class Pair(NamedTuple):
    """A synchronous run, and an asynchronous one with other devices.

    Args:
        groups, size, mini: prompts of a batch, responses of a prompt, prompts of an optimizer step.
        engines: of the synchronous run, and of the other.
        rollout_s: printed, of the synchronous run.
        rounds: of the synchronous run that is fitted.
    """

    name: str
    groups: int
    size: int
    mini: int
    max_tokens: int
    engines: tuple[int, int]
    rollout_s: float
    trainers: tuple[Trainer, Trainer]
    rounds: int = SYNC_ROUNDS

    def given(self, seconds: float) -> "Pair":
        """The pair with the printed training time of the asynchronous run."""
        return self._replace(trainers=(self.trainers[0], Trainer(seconds)))


VIME = Pair("vime", 32, 8, 32, 2048, (1, 1), 97.2, (Trainer(81.4), Trainer(81.4)))
VIME_PRINTED = {"step": 104.0, "wait": 4.6, "training": 99.6}
_NETWORK = SimClusterSettings()
_LINK = _NETWORK.network_bytes_per_s * _NETWORK.link_efficiency
CONSTANT_S, CONSTANT_7B = (num * (UPDATE_S + 3 * BYTES_PER_WEIGHT / _LINK) for num in (30.53e9, 7.62e9))
"""Of an optimizer step of Qwen3-30B-A3B and of Qwen2.5-7B, whatever the devices (sim/cluster.py)."""


def scaled(seconds: float, updates: int, fewer: float) -> tuple[Trainer, Trainer]:
    """The trainer of a 7B model that takes these seconds for a batch; and on `fewer` times fewer devices."""
    passes_s = seconds - updates * CONSTANT_7B
    return Trainer(passes_s, CONSTANT_7B), Trainer(fewer * passes_s, CONSTANT_7B)


UPDATES_30B = 4
SYNC_30B, REFERENCE_30B, UPDATE_30B = 497.89, (20.86, 50.05), (86.27, 206.63)
"""Seconds of the synchronous step; of the reference and of update_actor on 128 and on 32 devices."""
PASSES_30B = UPDATE_30B[0] - UPDATES_30B * CONSTANT_S
LARGE = Pair(
    *("verl 30B", 512, 16, 128, 8192, (32, 24), 348.05),
    (
        Trainer(PASSES_30B + REFERENCE_30B[0], CONSTANT_S),
        Trainer(4 * (PASSES_30B + REFERENCE_30B[0]), CONSTANT_S),
    ),
)
LARGE_PRINTED = {"step": 282.75, "wait": 22.06}
SMALL = Pair("verl 7B", 512, 16, 128, 10_240, (4, 2), 52.939, (Trainer(430.263), Trainer(435.874)))
"""Its trainer takes as long on 8 devices as on 16: that is given, not predicted."""
SMALL_SYNC, SMALL_PRINTED = 484.623, {"step": 489.953}
RETOOL_SYNC, RETOOL_PRINTED = 375.47, {"step": 221.36, "wait": 40.59, "training": 179.58}
RETOOL = Pair("verl ReTool", 64, 16, 16, 16_384, (8, 4), 228.03, scaled(111.84, 4, 2))
FETCHES = {1: (203.47, 30.88, 181.08), 2: (158.72, 26.32, 128.08), 4: (124.64, 25.62, 95.06)}
"""Seconds of a step, in which the trainer waits and works, by optimizer steps of 32 prompts in a fetch."""
FETCHING = Pair("verl 7B, fetches", 512, 16, 32, 28_672, (32, 16), 177.85, (Trainer(113.81),) * 2)
ONE_STEP = {
    "FSDP2": (749.0, {"step": 520.0, "wait": 45.0, "training": 445.0}, 458.0),
    "Megatron": (699.0, {"step": 566.0, "wait": 59.0}, 501.0),
}
"""Seconds of the synchronous step, of the other, and of the rollout on 4 devices."""
ONE_STEP_PAIRS = (
    Pair("one step, FSDP2", 512, 12, 32, 20_480, (8, 2), 247.0, scaled(88.0 + 286.0, 16, 16 / 12)),
    Pair("one step, Megatron", 512, 12, 32, 8192, (8, 2), 162.0, (Trainer(463.0), Trainer(467.0))),
)
"""12 devices train of the 16 that also generate; Megatron takes as long on them, which is given."""
STALENESS, STEPS = {1: 0.97, 3: 2.49}, 40
"""Of Tinker's trained groups, mean over so many steps, by how many batches sampling is ahead."""
ROLLOUTS, UNIRL_S = 18, {"separate": 8497.0, "stale-1": 8463.0, "refilled": 5863.0}
"""Seconds of so many rollouts."""
LONGER_S = (UNIRL_S["refilled"] - UNIRL_S["separate"] / ROLLOUTS) / (ROLLOUTS - 1)
"""Of the longer one of generation and of scores with training, in each rollout but the first."""
UNIRL = Pair(
    *("UniRL", 16, 8, 16, 8192, (1, 1), LONGER_S),
    (Trainer(UNIRL_S["separate"] / ROLLOUTS - LONGER_S),) * 2,
    ROLLOUTS,
)
SKYRL = Pair("SkyRL", 32, 8, 32, 8192, (8, 8), 310.1, (Trainer(57.3), Trainer(61.3)))
DRAFTED_S, ACCEPTANCE = 152.4, (0.886, 0.770, 0.663)
"""Of a rollout with drafts, and the printed shares of right drafts up to each depth, which are given."""


def _settings(pair: Pair, which: int, slower: float, tokens_per_s: float) -> SimSettings:
    engines = {"count": pair.engines[which], "slots": 1024, "prefill_tokens_per_s": 1e12, "load_s": 0.0}
    engines |= {"base_s": slower * UNSCALED.base_s, "slope_s": slower * UNSCALED.slope_s}
    trainer = {"tokens_per_s": tokens_per_s, "step_s": pair.trainers[which].step_s}
    lengths = {"median_tokens": MEDIAN, "max_tokens": pair.max_tokens, "prompt_tokens": PROMPT}
    rewards = {"median_s": 0.0, "workers": pair.groups * pair.size}
    return SimSettings.model_validate(
        {"engines": engines, "trainer": trainer, "lengths": lengths, "rewards": rewards}
    )


def _run(pair: Pair, sim: SimSettings, schedule: Schedule, rounds: int, warm_up: int, seed: int) -> Simulated:
    of_run = RunSettings(rounds=rounds, group_size=pair.size, seed=seed)
    return simulate(schedule, sim, of_run, warm_up_rounds=warm_up)


@cache
def fitted(pair: Pair, seed: int) -> tuple[float, float]:
    """The factor of a decode step, and the tokens of a batch, at which the synchronous run takes the printed
    times."""
    schedule = partial(serial, groups_per_round=pair.groups, groups_per_step=pair.mini)
    once = _run(pair, _settings(pair, 0, 1.0, RATE), schedule, pair.rounds, 0, seed).figures
    updates = pair.groups // pair.mini
    tokens = RATE * (once["trainer_compute_s"] - updates * pair.trainers[0].step_s)
    return pair.rollout_s / once["rollout_time_s"], tokens


@cache
def predicted(pair: Pair, schedule: Schedule, seed: int, which: int = 1, rounds: int = ROUNDS) -> Simulated:
    """Run a schedule on the devices of the asynchronous run, or of the synchronous one (0)."""
    slower, tokens = fitted(pair.given(0.0), seed)  # whose asynchronous trainer does not matter: one fit
    sim = _settings(pair, which, slower, tokens / pair.trainers[which].passes_s)
    return _run(pair, sim, schedule, rounds, WARM_UP_ROUNDS if rounds == ROUNDS else 0, seed)


def _step(pair: Pair, schedule: Schedule, seed: int) -> dict[str, float]:
    """Seconds of the asynchronous step for a batch, and those in which the trainer waits and works."""
    figures = predicted(pair, schedule, seed).figures
    step_s = pair.groups * pair.size / figures["samples_per_s"]
    works_s = figures["trainer_compute_s"]
    return {"step": step_s, "wait": step_s - works_s, "training": works_s}


def _rows(
    name: str,
    printed: Mapping[str, float],
    ours: Mapping[str, float],
    sync_s: float,
    kind: Kind = "predicted",
) -> list[Figure]:
    figures = [Figure(name, what, "s", each, ours[what], kind) for what, each in printed.items()]
    error = 100 * (ours["step"] / printed["step"] - 1)
    figures.append(Figure(name, "error of the step", "%", None, error))
    gains = sync_s / printed["step"], sync_s / ours["step"]
    return [*figures, Figure(name, "gain over the synchronous step", "x", *gains, "determined", 0.1)]


def _given(pair: Pair, training_s: float, printed_s: float, schedule: Schedule, seed: int) -> Figure:
    ours = _step(pair.given(training_s), schedule, seed)["step"]
    return Figure(pair.name, "step, with its printed training time", "s", printed_s, ours)


def pairs(seed: int) -> Table:
    """An asynchronous step from the parts of a synchronous one."""
    pool = VIME.groups * VIME.size
    continuous = partial(
        pipelinerl, groups_per_step=VIME.mini, in_flight_per_engine=pool, ring_groups=2 * VIME.groups
    )
    figures = _rows("vime", VIME_PRINTED, _step(VIME, continuous, seed), 178.3)
    figures.append(_given(VIME, VIME_PRINTED["training"], VIME_PRINTED["step"], continuous, seed))
    streamed = partial(fully_async, groups_per_sync=512, groups_per_step=128, alive=768, per_engine=256)
    ours = _step(LARGE, streamed, seed)
    update_s = 4 * PASSES_30B + UPDATES_30B * CONSTANT_S
    figures += [
        Figure("verl 30B", "update_actor on 32 devices", "s", UPDATE_30B[1], update_s),
        Figure("verl 30B", "reference on 32 devices", "s", REFERENCE_30B[1], 4 * REFERENCE_30B[0]),
        *_rows("verl 30B", LARGE_PRINTED, ours, SYNC_30B),
        _given(LARGE, UPDATE_30B[1] + REFERENCE_30B[1], LARGE_PRINTED["step"], streamed, seed),
    ]
    figures += _rows("verl 7B", SMALL_PRINTED, _step(SMALL, streamed, seed), SMALL_SYNC)
    fetched = partial(fully_async, groups_per_sync=64, groups_per_step=16, alive=128, per_engine=256)
    figures += _rows(RETOOL.name, RETOOL_PRINTED, _step(RETOOL, fetched, seed), RETOOL_SYNC)
    figures.append(_given(RETOOL, RETOOL_PRINTED["training"], RETOOL_PRINTED["step"], fetched, seed))
    for steps, (step_s, wait_s, training_s) in FETCHES.items():
        fetched = partial(streamed, groups_per_step=steps * FETCHING.mini)
        ours, row = _step(FETCHING.given(training_s), fetched, seed), f"verl 7B, fetches of {32 * steps}"
        figures.append(Figure(row, "step, with its printed training time", "s", step_s, ours["step"]))
        figures.append(Figure(row, "wait", "s", wait_s, ours["wait"]))
    notes = (
        "vime: the trainer takes 22% longer while engines generate, which nothing here predicts.",
        "verl: while the trainer bounds the step, the printed run waits for samples for 22 and 53 s of it.",
        "verl 30B: its trainer has a quarter of the devices. An optimizer step has the constant of"
        f" sim.cluster, {CONSTANT_S:.1f} s; update_actor of both rows is a / n + 11.5 s an optimizer step.",
        "verl 7B: the trainer bounds both runs, and its time does not scale with its devices: it is given."
        " What is left to gain is the rollout. In the printed run the trainer waits 52.6 s although samples"
        " are ready: verl's `gen` has the calls that fetch prompts one by one, unpickle and pad them: 21 to"
        " 59 s for 512 prompts in all rows with stale samples. No cost here has that.",
        "ReTool: tools are part of the rollout; the published script has 16 responses of at most 16K tokens.",
        "Fetches: the lengths change with the fetch, so the training time of each row is given.",
    )
    return Table("Steps", "asynchronous steps from synchronous ones", tuple(figures), notes)


def one_step_ahead(seed: int) -> Table:
    """verl's batch that is generated ahead on 4 devices, while 12 train."""
    figures: list[Figure] = []
    ahead = partial(one_step_off, groups_per_round=512, groups_per_step=32)
    for pair, (sync_s, printed, rollout_s) in zip(ONE_STEP_PAIRS, ONE_STEP.values(), strict=True):
        ours = predicted(pair, ahead, seed).figures["rollout_time_s"]
        figures.append(Figure(pair.name, "rollout on 4 devices", "s", rollout_s, ours))
        figures += _rows(pair.name, printed, _step(pair, ahead, seed), sync_s)
    notes = (
        "The rollout of the synchronous row is `generate_sequences`; its `gen` has 74 and 45 s besides.",
        "Training is old_log_prob and update_actor.",
    )
    return Table("One step", "one step off from synchronous steps", tuple(figures), notes)


def staleness(seed: int) -> Table:
    """How old trained samples are if sampling is faster than training, and is ahead by some batches."""
    fast = SimSettings.model_validate(
        {"engines": {"base_s": 1e-6, "slope_s": 0.0}, "rewards": {"median_s": 0}}
    )
    figures = []
    for ahead, printed in STALENESS.items():
        schedule = partial(tinker_async, groups_per_step=8, steps_off_policy=ahead)
        of_run = RunSettings(rounds=STEPS, group_size=8, seed=seed)
        ours = simulate(schedule, fast, of_run).figures["lag_mean"]
        row = f"Tinker, {ahead} ahead"
        figures.append(Figure(row, "mean staleness; ours of tokens", "", printed, ours))
    return Table("Staleness", "batches that are sampled ahead, 40 steps", tuple(figures))


def drafts(seed: int) -> Table:
    """A rollout with drafts from one without."""
    schedule = partial(serial, groups_per_round=SKYRL.groups, groups_per_step=SKYRL.mini)
    slower, tokens = fitted(SKYRL, seed)
    sim = _settings(SKYRL, 1, slower, tokens / SKYRL.trainers[1].passes_s)
    drafting = sim.changed(engines={"acceptance": ACCEPTANCE})
    ours = _run(SKYRL, drafting, schedule, SYNC_ROUNDS, 0, seed).figures["rollout_time_s"]
    gain = SKYRL.rollout_s / DRAFTED_S, SKYRL.rollout_s / ours
    figures = (
        Figure("SkyRL", "rollout with drafts of three tokens", "s", DRAFTED_S, ours),
        Figure("SkyRL", "gain of drafts", "x", *gain, "determined", 0.1),
    )
    note = "A drafted token costs a row of a step, as a request does. To make drafts takes no time here."
    return Table("Drafts", "a rollout whose steps check drafts", figures, (note,))


async def refilled(run: Run, groups_per_round: int, early: bool) -> None:
    """A batch is generated ahead of the one that is trained.

    Args:
        early: its generation begins before scores and training of the batch before, not after them.
    """
    run.declare(staleness=1)
    async for _ in run.rounds():
        if not len(run.pool):
            run.pool.launch(run.prompts(groups_per_round))
        groups = await run.pool.take(groups_per_round)
        if early:
            run.pool.launch(run.prompts(groups_per_round))
        await run.train(groups)
        await run.publish()


def refills(seed: int) -> Table:
    """When the next rollout begins: after training, or before scores and training."""
    groups = UNIRL.groups
    schedules: Mapping[str, Schedule] = {
        "separate": partial(serial, groups_per_round=groups, groups_per_step=groups),
        "stale-1": partial(refilled, groups_per_round=groups, early=False),
        "refilled": partial(refilled, groups_per_round=groups, early=True),
    }
    ours = {
        name: predicted(UNIRL, schedule, seed, rounds=ROLLOUTS).seconds
        for name, schedule in schedules.items()
    }
    figures = []
    for name, printed in UNIRL_S.items():
        kind: Kind = "predicted" if name == "stale-1" else "fitted"
        figures.append(Figure("UniRL", f"18 rollouts, {name}", "s", printed, ours[name], kind))
    gain = UNIRL_S["separate"] / UNIRL_S["stale-1"], ours["separate"] / ours["stale-1"]
    figures.append(Figure("UniRL", "gain of stale-1 without an early refill", "x", *gain, "determined", 0.05))
    note = (
        "The parts of a rollout are not printed. That generation takes longer than scores and training, and"
        " by how much, is fitted to the third row."
    )
    return Table("Refills", "when the pool is refilled", tuple(figures), (note,))


PARAMETERS = """
printed 6 | vime: 32 prompts of 8, at most 2K tokens, one engine; rollout and training of the synchronous
    step | issue 358
printed 9 | verl 30B: 512 prompts of 16, 128 a step, at most 8K tokens, 96 and 32 devices; rollout, reference
    and update of the synchronous step | fully_async.md
printed 8 | verl 7B: at most 10K tokens, 8 and 8 devices, fetches of 128; rollout and both trainers |
    fully_async.md
printed 12 | ReTool, fetches, one step: prompts, responses, limits, devices; rollout and training of the
    synchronous step; the training of fetches and of Megatron | the same pages, published scripts
printed 9 | SkyRL: 32 prompts of 8, at most 8,192 tokens, 8 devices; rollout, both trainers, the share of
    right drafts by depth | docs/examples/spec_decode
printed 3 | Tinker: steps, and batches ahead | pull request 822
printed 2 | UniRL: 18 rollouts of at most 8,192 tokens | pull request 213
fitted 16 | the factor of a decode step and the trainer's rate of each pair | their synchronous rows
fitted 2 | UniRL: generation, and scores with training | the rows separate and refilled
assumed 1 | Tinker: sampling is faster than training |
assumed 6 | lengths with median 1,230, sigma 1.3 and correlation 0.7; prompts of 150 tokens; engines of 4
    devices (verl) or of one (SkyRL); a fixed number of requests in flight (vime) |
"""
PAPER = Paper(
    name="peers",
    citation="Pairs of runs that vime, verl, UniRL, SkyRL and Tinker printed, 2025 and 2026",
    set_up=("A synchronous run is fitted, its asynchronous counterpart is predicted; rewards take no time.",),
    parameters=parameters(PARAMETERS),
    tables={
        "Steps": pairs,
        "One step": one_step_ahead,
        "Refills": refills,
        "Drafts": drafts,
        "Staleness": staleness,
    },
    contradictions=(
        "verl 7B: the trainer takes 430 s on 16 devices that also generate, and 436 s on 8 that only train.",
    ),
    not_attempted="A second pending batch (UniRL). These print too few parts: UniRL, issue 94, no seconds;"
    " NeMo-RL, pull request 1381 and its page of performance, no times of generation and of training;"
    " marin, issue 8955, neither the groups of an update nor times.",
)
