"""Self-tests of a server before a run: each failure is one message in the user's words.

`check_server` needs the server alone, and is repeated when it comes back. `check_policy` compares it with the
trainer, once, while both have the weights of the model folder.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf

from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import DTYPE, Weights
from tailrace.drivers.engine.probes import spread
from tailrace.drivers.engine.settings import ServerEngineSettings
from tailrace.errors import ConfigError, ServerRefused
from tailrace.extras.http.dialect import Attempt, Chunk
from tailrace.extras.http.engine import Connection, HttpEngine
from tailrace.types import Group, Prompt, Sample, SampleId

PROMPT_TOKENS, PROBE_TOKENS = 32, 128
"""Tokens of a probe's prompt, and of its completion, at most."""
PROBES = 16
"""The most completions, until they have PROBE_TOKENS together: a completion may end early."""
MEAN_LIMITS: Mapping[DTYPE, float] = {"float32": 0.01, "bfloat16": 0.15}
MAX_LIMITS: Mapping[DTYPE, float] = {"float32": 0.05, "bfloat16": 3.0}
"""Limits of the largest difference, by the coarser type of server and trainer. Measured in bfloat16 with 135M
parameters in 30 layers: the same weights differ by 0.03 to 0.08 in the mean and by up to 0.8 for one token; a
server that lacks a tensor, or reports log-probs without a temperature of 0.9, by 0.13 or more in the mean."""
LONG_PROMPT = 600
"""Tokens of the prompt that must come from the prefix cache, at most: prefix caches count in blocks, of up to
256 tokens."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected properties of a server.

    Args:
        vocabulary: tokens of the model.
        min_context: tokens that a prompt and its completion may have together.
        trainer_dtype: of the trainer's matrix products.
    """

    settings: ServerEngineSettings
    sampling: SamplingSettings
    vocabulary: int
    min_context: int
    trainer_dtype: DTYPE = "float32"

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the difference to the trainer's log-probs: in the mean, and of each."""
        settings = self.settings
        dtype: DTYPE = "float32" if {settings.dtype, self.trainer_dtype} == {"float32"} else "bfloat16"
        return (
            settings.max_mean_logprob_difference or MEAN_LIMITS[dtype],
            settings.max_logprob_difference or MAX_LIMITS[dtype],
        )


def refusal(expected: Expected, connection: Connection, problem: str, remedy: str) -> ConfigError:
    """A ConfigError about a server, under the setting that names it."""
    settings = expected.settings
    key, value = ("engine.urls", connection.url) if settings.urls else ("engine.kind", settings.kind)
    return ConfigError(key, value, problem, remedy)


async def check_server(connection: Connection, expected: Expected) -> None:
    """Check what a server says about itself. Raises a ConfigError if it is not what the run needs."""
    dialect, settings, sampling = connection.dialect, expected.settings, expected.sampling
    if dialect.missing:
        remedy = "; ".join(dialect.missing)
        raise refusal(expected, connection, f"{dialect.server} lacks what a run needs", f"it lacks {remedy}")
    if (sampling.top_p < 1 or sampling.top_k > 0) and not dialect.capabilities.sampling_mask:
        keys = "sampling.top_p and sampling.top_k"
        problem = f"{dialect.server} reports log-probs of the tokens that {keys} keep, not of the policy"
        remedy = "set top_p = 1 and top_k = 0; with vLLM, temperature = 1 and --logprobs-mode raw_logprobs do"
        raise refusal(expected, connection, problem, remedy)
    if dialect.dtype not in (None, settings.dtype):
        problem = f"it serves {dialect.dtype}, and engine.dtype is {settings.dtype}"
        raise refusal(expected, connection, problem, f"start it with --dtype {settings.dtype}")
    if dialect.max_context is not None and dialect.max_context < expected.min_context:
        problem = f"its context is {dialect.max_context} tokens, and a sample may have {expected.min_context}"
        raise refusal(expected, connection, problem, "start it with a longer context, or shorten the samples")


async def check_policy(
    engine: HttpEngine,
    expected: Expected,
    weights: Weights,
    trainer_logprobs: Callable[[Sample], Awaitable[list[float]]],
) -> None:
    """Check that the server has the trainer's policy, before and after an update that changes nothing, and
    that requests of different versions share no prefix cache.

    Args:
        weights: a publication of the weights of the model folder.
        trainer_logprobs: the log-probs of a sample under them, at the sampling temperature.

    Raises:
        ConfigError: it has not.
        TransferFailed: the weights do not reach it.
    """
    await _check_vocabulary(engine.connection, expected)
    for when in ("after its weights were loaded", "after the same weights were loaded again"):
        await engine.load(weights, kv="recompute")
        off: list[float] = []
        for number in range(PROBES):
            if len(off) < PROBE_TOKENS:
                sample = await _probe(engine.connection, expected, number)
                pairs = zip(sample.behavior_logprobs, await trainer_logprobs(sample), strict=True)
                off += [abs(have - trainer) for have, trainer in pairs]
        mean, largest = (sum(off) / len(off), max(off)) if off else (inf, inf)
        mean_limit, limit = expected.limits
        if not (mean <= mean_limit and largest <= limit):
            problem = (
                f"{when}, its log-probs are off the trainer's by {mean:.3g} in the mean "
                f"(limit: {mean_limit:g}) and by {largest:.3g} at most (limit: {limit:g})"
            )
            remedy = (
                "serve the folder of model.path; if it is that one, raise engine.max_mean_logprob_difference "
                "or engine.max_logprob_difference"
            )
            raise refusal(expected, engine.connection, problem, remedy)
    await _check_salt(engine.connection, expected)


async def _check_vocabulary(connection: Connection, expected: Expected) -> None:
    """A token beyond the vocabulary must be refused."""
    beyond = connection.probe([expected.vocabulary], 1, seed=0, salt="vocabulary")
    try:
        await connection.whole(beyond)
    except ServerRefused:
        return
    problem = f"it takes token {expected.vocabulary}, and the model's vocabulary has {expected.vocabulary}"
    raise refusal(expected, connection, problem, "serve the folder of model.path")


async def _probe(connection: Connection, expected: Expected, number: int) -> Sample:
    """A completion of a prompt whose tokens are spread over the vocabulary, another one for each number."""
    length = min(PROMPT_TOKENS, expected.min_context // 2)
    ids = spread(length, expected.vocabulary, number * length)
    num = min(PROBE_TOKENS, expected.min_context - length)
    attempt = connection.probe(ids, num, seed=number, salt="probe")
    chunk = await _answer(connection, expected, attempt)
    group = Group(Prompt(0, ids), 1, [])
    sample = Sample(SampleId(0, 0, 0), group, finish_reason="length")
    sample.extend(chunk.ids, chunk.logprobs, 0)
    return sample


async def _check_salt(connection: Connection, expected: Expected) -> None:
    """A long prompt comes from the cache when its salt is repeated, and not when the salt is another."""
    ids = spread(min(LONG_PROMPT, expected.min_context - 1), expected.vocabulary)
    cached = []
    for salt in ("one", "one", "other"):
        attempt = connection.probe(ids, 1, seed=0, salt=salt)
        cached.append((await _answer(connection, expected, attempt)).num_cached or 0)
    if cached[1] and cached[2] >= cached[1]:
        problem = (
            "its prefix cache ignores cache_salt, so a prefix of old weights would be used after an update"
        )
        raise refusal(expected, connection, problem, "update the server, or switch its prefix cache off")


async def _answer(connection: Connection, expected: Expected, attempt: Attempt) -> Chunk:
    try:
        return await connection.whole(attempt)
    except ServerRefused as refused:
        raise refusal(
            expected, connection, f"it refuses a probe: {refused}", "serve the folder of model.path"
        ) from refused
