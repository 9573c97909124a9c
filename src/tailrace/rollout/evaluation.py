"""Evaluation: held-out prompts through the same engines and rewards, outside the pool and the ledger."""

import asyncio
from collections.abc import Callable, Sequence
from math import comb
from statistics import fmean

from tailrace.clock import now, waiting
from tailrace.contracts.data import Prompts
from tailrace.contracts.reward import Rewards
from tailrace.errors import BadRow, RewardFailed
from tailrace.record.events import EvaluatedSample, RowSkipped
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, noise_seed


def held_out_samples(
    prompts: Prompts,
    n: int,
    seed: int,
    attempt: int,
    *,
    greedy: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    per_prompt: int = 1,
    skipped: Callable[[RowSkipped], None] = lambda skipped: None,
) -> list[Sample]:
    """Samples of each of the first n usable prompts, whose indices are negative: training uses the others.
    A row that comes again in these is left out, so fewer rows than n have fewer samples.

    Args:
        attempt: number of the evaluation; another one has other sampling noise.
        greedy: the engine takes the most likely token at each position.
        temperature, top_p: in place of the engine's.
        per_prompt: samples of each prompt.
        skipped: is told of each row without a usable prompt.
    """
    samples: list[Sample] = []
    rows, index, num_usable = set[int | None](), 0, 0
    while num_usable < n:
        try:
            group = Group(prompts[index], per_prompt, [], num_launched=per_prompt)
        except BadRow as bad:
            skipped(RowSkipped(now(), -index - 1, bad.reason, bad.detail))
            continue
        finally:
            index += 1
        num_usable += 1
        if group.prompt.row_number in rows:
            continue
        rows |= {group.prompt.row_number} - {None}
        ids = [SampleId(-index, attempt, number) for number in range(per_prompt)]
        first = 0 if greedy else attempt * per_prompt  # the noise of samples that no other evaluation has
        seeds = [noise_seed(seed, id._replace(number=first + id.number)) for id in ids]
        group.samples = [
            Sample(id, group, seed=seed_of_id, greedy=greedy, temperature=temperature, top_p=top_p)
            for id, seed_of_id in zip(ids, seeds, strict=True)
        ]
        samples += group.samples
    return samples


async def evaluate(samples: Sequence[Sample], router: Router, rewards: Rewards) -> list[EvaluatedSample]:
    """Generate and score all samples. The reward of one that cannot be scored is 0. One whose version no
    engine has any more is left out."""
    # Of all engines: those that are away now may come back while it runs.
    slots = asyncio.Semaphore(sum(engine.slots for engine in router.engines))

    async def score(sample: Sample) -> EvaluatedSample | None:
        async with slots:
            await router.serve(sample)
        if sample.finish_reason is None:
            return None
        if sample.scored:  # by the environment
            return EvaluatedSample.of(sample, sample.reward or 0.0, sample.failure)
        try:
            return EvaluatedSample.of(sample, await rewards.score(sample))
        except RewardFailed as failed:
            return EvaluatedSample.of(sample, 0.0, f"reward {failed.reason}")

    with waiting(f"{len(samples)} held-out samples"):
        return list(filter(None, await asyncio.gather(*(score(sample) for sample in samples))))


def solved_share(samples: Sequence[EvaluatedSample], solved_at: float) -> float:
    """The share of the samples whose reward is at least `solved_at`."""
    return fmean(sample.reward >= solved_at for sample in samples)


def metrics_of_sets(samples: Sequence[EvaluatedSample], solved_at: float) -> dict[str, float]:
    """Return avg@n and pass@k of each named data source, and of "all" where a prompt has several samples.

    pass@k is estimated without bias from the n samples of each prompt, for each power of two up to n, and n.

    Args:
        solved_at: reward from which a sample counts as solved.
    """
    sets: dict[str, dict[int, list[float]]] = {}
    for sample in samples:
        for name in {"all", sample.source or "all"}:
            sets.setdefault(name, {}).setdefault(sample.id.prompt, []).append(sample.reward)
    n = max((len(rewards) for rewards in sets.get("all", {}).values()), default=1)
    if n == 1:
        sets.pop("all", None)
    found: dict[str, float] = {}
    for name in sorted(sets):
        prompts = sets[name].values()
        found[f"{name}/avg@{n}"] = fmean(fmean(rewards) for rewards in prompts)
        for k in sorted({1 << power for power in range(n.bit_length())} | {n}):
            solved = (sum(reward >= solved_at for reward in rewards) for rewards in prompts)
            found[f"{name}/pass@{k}"] = fmean(pass_at(k, n, num_solved) for num_solved in solved)
    return found


def pass_at(k: int, n: int, num_solved: int) -> float:
    """Estimate the probability that one of k samples is solved from n samples (Chen et al., 2021)."""
    return 1.0 - comb(n - num_solved, k) / comb(n, k)
