"""Laminar (Sheng et al. 2025, arXiv 2510.12633): every engine takes new weights for itself, sections 3 to 6.

    an engine pulls the newest weights when its batch has ended         run.publish(to="idle")
    until then samples begin on its version                             oldest_to_begin, batch
    a sample ends on its version; no bound: inherent staleness          run.declare(pinned=1)
    after an update and on a timer: repack (Algorithm 1)                repack, run.every

We read the abstract and detailed notes. An engine of the newest version goes on beyond its batch. B is an
engine's slots. A KV cache moves with its request in simulations only; live, it is prefilled again.
"""

from collections.abc import Mapping
from functools import partial
from math import inf

from tailrace.contracts.engine import Engine
from tailrace.controller.run import Run
from tailrace.schedules.dora import of_one_version
from tailrace.schedules.parameters import Bound, Count, Seconds
from tailrace.schedules.window import Window


async def laminar(
    run: Run,
    groups_per_step: Count,
    groups_in_flight: Count,
    staleness: Bound | None = None,
    repack_s: Seconds = 5.0,
) -> None:
    """Engines pull the newest weights when they are idle; the last long samples share an engine.

    Args:
        groups_per_step, groups_in_flight: as in tailrace. An engine's batch is its share of groups_per_step.
        staleness: bound on the age of a trained token, in publications; None: no bound, as in the paper.
        repack_s: seconds between two looks for engines to empty, beside that after each update.
    """
    window = None if staleness is None else Window(run, groups_per_step, groups_in_flight, staleness)
    kv_before = dict[Engine, int]()
    run.declare(staleness=inf if staleness is None else staleness, pinned=1)
    run.router.versions.oldest_to_begin = window.oldest if window else lambda group: -inf
    run.router.versions.batch = groups_per_step * run.group_size / len(run.engines)
    with run.every(repack_s, partial(repack, run, kv_before)):
        async for _ in run.rounds():
            run.pool.launch(run.prompts(groups_in_flight - len(run.pool)))
            async for groups in window.stream() if window else run.pool.stream(groups_per_step):
                await run.accumulate(groups)
            await run.step()
            await run.publish(to="idle")
            repack(run, kv_before)


def repack(run: Run, kv_before: dict[Engine, int]) -> None:
    """Empty engines of older versions in ramp-down: C_used < min(C_max, C_prev), and fewer requests than B.
    `kv_before`: C_prev of each engine; C_used takes its place."""
    for version, engines in of_one_version(run).items():
        loads: dict[Engine, tuple[float, float]] = {}
        for engine in engines:
            usage, num = engine.usage(), len(run.serving(engine))
            capacity, before = usage.kv_capacity or inf, kv_before.get(engine, 0)
            kv_before[engine] = usage.kv_tokens
            if usage.kv_tokens < min(capacity, before) and 0 < num < engine.slots and version != run.version:
                loads[engine] = usage.kv_tokens / capacity, num / engine.slots
        targets = best_fit(loads)
        for source, target in targets.items():
            for sample in run.serving(source):
                run.move(sample, target)
        run.pull(targets)


def best_fit(loads: Mapping[Engine, tuple[float, float]]) -> dict[Engine, Engine]:
    """The engines to empty, from the smallest KV cache on, each with the engine that gets its requests: of
    those on which they fit, C <= C_max and N <= B, the one with the largest cache. `loads`: C / C_max and
    N / B of each engine."""
    left, found = dict(sorted(loads.items(), key=lambda item: item[1])), dict[Engine, Engine]()
    for source, (kv, num) in list(left.items()):
        fitting = (each for each, load in left.items() if load[0] + kv <= 1 and load[1] + num <= 1)
        targets = [each for each in fitting if each != source and source not in found.values()]
        if targets:
            found[source] = target = max(targets, key=left.__getitem__)
            left[target] = left[target][0] + kv, left[target][1] + num
            del left[source]
    return found
