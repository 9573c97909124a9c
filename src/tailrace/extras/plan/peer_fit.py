"""Fits the [sim] section of a config to the log of another framework.

A log has means over steps, and no requests. So all engines count as one, with a slot for each sample of a
step. Its decode step takes base_s + slope_s * running (`fit.py`): while the longest response of a step lasts,
base_s passes with each of its tokens, and slope_s with each token of all responses.
"""

from collections import Counter
from statistics import NormalDist

import numpy as np

from tailrace.extras.plan.fit import Fit, FitPart, Solution, correlation_within_groups, non_negative, rate
from tailrace.extras.plan.peers import SHOWN, PeerLog

NUM_QUANTILES, SIGMAS = 1000, np.arange(0.0, 3.01, 0.02)
QUANTILES = {0.5: "median_tokens", 0.9: "p90_tokens"}
MANY = 100
"""Different lengths, from which on they are rounded to two digits."""


def fit_peer(log: PeerLog) -> Fit:
    """Fit the costs and lengths of a simulation to a log."""
    decode, passes, notes = _solved(log)
    if log.other_s > SHOWN * log.mean("step_s"):
        notes.append(f"{log.other_s:.3g} s a step are in no part, and count as the optimizer step's")
    samples, num = round(log.mean("samples")), len(log.steps)
    engines = {
        "count": 1,
        "slots": samples,
        "base_s": decode.coefficients.get("base") or 1e-9,
        "slope_s": decode.coefficients.get("slope", 0.0),
        "prefill_tokens_per_s": rate(1.0, decode.coefficients.get("prefill", 0.0)),
        "kv_tokens": round(samples * (log.mean("prompt_tokens") + log.column("max_tokens").max())),
        "load_s": log.mean("sync_s"),
        "sleep_s": 0.0,
        "wake_s": 0.0,
    }
    trainer = {
        "tokens_per_s": rate(1.0, passes.coefficients.get("tokens", 0.0)),
        "step_s": passes.coefficients.get("step", 0.0) + log.other_s,
        "publish_s": 0.0,
    }
    rewards = {"workers": samples, "median_s": log.mean("reward_s"), "sigma": 0.0}
    sections = {"engines": engines, "trainer": trainer, "rewards": rewards, "lengths": _lengths(log)}
    shares = {"trainer": passes.explained} | ({} if log.overlaps else {"engines": decode.explained})
    parts = [FitPart("log", {}, num, None, [log.waits, *log.notes, *notes])]
    for name, section in sections.items():
        values = {f"sim.{name}.{key}": value for key, value in section.items()}
        parts.append(FitPart(name, values, num, shares.get(name)))
    return Fit(parts)


def _solved(log: PeerLog) -> tuple[Solution, Solution, list[str]]:
    """Return the costs of generation and of training, and what is assumed of them."""
    num, longest, one = log.column("samples"), log.column("max_tokens"), np.ones(len(log.steps))
    tokens, prompts = log.column("mean_tokens") * num, log.column("prompt_tokens") * num
    of_training = {"tokens": tokens + prompts, "step": one}
    if log.has("update_s"):
        passes = non_negative(of_training, log.column("update_s"), tokens)
    if log.overlaps:
        busy_s = log.column("step_s") - log.column("sync_s") - log.column("held_s")
        words = "assumed: engines generate all the time, at once as many samples as a step has"
        if log.in_turn:
            busy_s, words = log.column("wait_s"), words.replace("all the time", "while the trainer waits")
        return non_negative({"base": tokens / num}, busy_s, tokens), passes, [words]
    if log.has("generation_s"):
        of_generation = {"base": longest, "slope": tokens, "prefill": prompts}
        return non_negative(of_generation, log.column("generation_s"), longest), passes, []
    rest_s = log.column("step_s") - log.column("reward_s") - log.column("sync_s")
    both = non_negative({"base": longest} | of_training, rest_s, longest)
    words = "generation is what grows with the longest response, training what grows with all tokens"
    return both, both, [f"assumed: {words}"]


def _lengths(log: PeerLog) -> dict[str, object]:
    """The dumped lengths and their correlation; without any, a lognormal distribution."""
    limit = round(log.column("max_tokens").max())
    found: dict[str, object] = {"max_tokens": limit, "prompt_tokens": round(log.mean("prompt_tokens"))}
    if not log.groups:
        median, sigma = lognormal(log, limit)
        return found | {"median_tokens": median, "sigma": sigma}
    given = [min(limit, each) for group in log.groups for each in group]
    digits = 3 if len(set(given)) < MANY else 2
    counts = Counter(max(1, int(float(f"{each:.{digits}g}"))) for each in given)
    tokens = sorted(counts)
    table = {"kind": "table", "tokens": tokens, "shares": [counts[each] for each in tokens]}
    numbered = {(n, k): each for n, group in enumerate(log.groups) for k, each in enumerate(group)}
    correlation = correlation_within_groups(numbered)
    return found | {"distribution": table} | ({} if correlation is None else {"correlation": correlation})


def lognormal(log: PeerLog, limit: int) -> tuple[float, float]:
    """Return median and sigma of the lognormal distribution, clipped at a limit, that has the mean of the log
    and is nearest to its quantiles and its share of clipped responses, or to its longest where none is."""
    ranks = np.arange(1, NUM_QUANTILES + 1) / NUM_QUANTILES
    normal = np.array([NormalDist().inv_cdf(rank - 0.5 / NUM_QUANTILES) for rank in ranks])
    of_longest = np.diff(ranks ** log.mean("samples"), prepend=0.0)
    mean, longest, clipped = (log.mean(name) for name in ("mean_tokens", "max_tokens", "clipped"))
    known = {share: log.mean(name) for share, name in QUANTILES.items() if log.has(name)}
    found = []
    for sigma in SIGMAS:
        low, high = 0.0, np.log(limit) + 3 * sigma
        for _ in range(40):
            middle = (low + high) / 2
            lengths = np.minimum(limit, np.exp(middle + sigma * normal))
            low, high = (middle, high) if lengths.mean() < mean else (low, middle)
        share, most = float((lengths >= limit).mean()), float(lengths @ of_longest)
        errors = [share - clipped if clipped else most / longest - 1]
        errors += [np.quantile(lengths, at) / tokens - 1 for at, tokens in known.items()]
        errors += [lengths.std() / log.mean("std_tokens") - 1] if log.has("std_tokens") else []
        found.append((float(np.abs(errors).sum()), float(np.exp(middle)), float(sigma)))
    _, median, sigma = min(found)
    return median, sigma
