"""DORA (Hu et al. 2026, arXiv 2604.26256): multi-version streaming rollout, sections 4.2 and 4.3.

    a sample ends on its version                                          run.declare(pinned=1)
    K versions; the window moves on when the oldest has no group left     Window, staleness = K - 1
    Algorithm 1: 1. top-up, on the newest version first                   run.pool.launch
    2. DP_w = Round(DP_total R_w / sum R) engines for version w           divide
    3. the others load the newest version, their requests move            run.pull, spread
    4. prompts for the idle slots of older versions                       oldest_to_begin, divide
    triggers: an update, a timer, a full KV cache                         run.every

Engines load the newest version only, so a version keeps those whose KV caches its requests fill. A sample
gets its version when it begins; the paper tags prompts that wait. All steps have as many groups, so the
trainer waits earlier for those that are due. A KV cache moves with its request, without prefill, in
simulations only; no cache is copied to the host's memory. A slot is idle only if the KV cache has room, too.
"""

from collections import Counter
from math import ceil, inf

from tailrace.contracts.engine import Engine
from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count, Seconds, Share
from tailrace.schedules.window import Window


async def dora(
    run: Run,
    groups_per_step: Count,
    groups_in_flight: Count,
    staleness: Bound,
    rebalance_s: Seconds = 30.0,
    kv_pressure: Share = 0.9,
) -> None:
    """Several versions are served at a time; engines are divided among them by the requests that they have.

    Args:
        groups_per_step, groups_in_flight, staleness: as in tailrace; idle slots of older versions get more
            groups, if the bound allows it.
        rebalance_s: seconds between two divisions of the engines, beside that after each update.
        kv_pressure: share of a KV cache above which the engines are divided within a second, too.
    """
    window = Window(run, groups_per_step, groups_in_flight, staleness)

    def rebalance() -> None:
        missing = max(0, min(groups_in_flight - len(run.pool), window.room))
        num_idle = divide(run, missing * run.group_size)
        spread(run)
        run.pool.launch(run.prompts(missing))
        run.pool.launch(run.prompts(max(0, min(num_idle // run.group_size, window.room))))

    def check() -> None:
        if any(kv_share(engine) > kv_pressure for engine in run.engines):
            rebalance()

    run.declare(staleness=staleness, pinned=1)
    run.router.versions.oldest_to_begin = window.oldest
    with run.every(rebalance_s, rebalance), run.every(1.0, check):
        async for _ in run.rounds():
            groups_of_step = window.stream()
            rebalance()
            async for groups in groups_of_step:
                await run.accumulate(groups)
            await run.step()
            await run.publish(to="idle")


def divide(run: Run, num_new: int) -> int:
    """Give each older version the engines of its share of the requests, or those that its KV caches fill, and
    the newest the others. `num_new`: requests to be launched. Returns idle slots of older versions."""
    own = Counter(sample.pin for engine in run.engines for sample in run.serving(engine))
    unfinished = sum(not sample.ended for group in run.pool.groups for sample in group.samples)
    engines, num_idle = [engine for engine in run.engines if engine.state == "open"], 0
    for version, older in of_one_version(run).items():
        if version != run.version:
            share = len(engines) * own[version] / max(1, unfinished + num_new)
            num_kept = max(round(share), ceil(sum(map(kv_share, older))), min(own[version], 1))
            older.sort(key=lambda engine: -len(run.serving(engine)))
            run.pull(older[num_kept:])
            num_idle += sum(each.usage().num_fitting(each.slots) for each in older[:num_kept]) - own[version]
    return min(num_idle, sum(engine.slots for engine in engines) - unfinished - num_new)


def of_one_version(run: Run) -> dict[int, list[Engine]]:
    """The open engines by the version that they serve, without those that load another one."""
    engines = [engine for engine in run.engines if engine.state == "open" and run.served(engine)]
    versions = sorted({run.served(engine)[-1] for engine in engines})
    return {each: [engine for engine in engines if run.served(engine)[-1] == each] for each in versions}


def spread(run: Run) -> None:
    """Requests that wait for room in a KV cache, those that came last, move to engines of their version that
    have some."""
    for engines in of_one_version(run).values():
        free = {each: each.usage().num_fitting(each.slots) - len(run.serving(each)) for each in engines}
        for source in engines:
            for sample in run.serving(source)[::-1][: max(0, -free[source])]:
                target = max(engines, key=free.__getitem__)
                if free[target] > 0:
                    free[target] -= 1
                    run.move(sample, target)


def kv_share(engine: Engine) -> float:
    """Share of its KV cache that the requests of an engine fill; 1 if some wait for room."""
    usage = engine.usage()
    return 1.0 if usage.num_waiting else usage.kv_tokens / (usage.kv_capacity or inf)
