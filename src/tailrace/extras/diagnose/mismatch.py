"""The log-ratio of trained tokens, current policy to behaviour policy, in parts that add up.

    numerics   trainer - engine, both under the weights of the token, the engine with a fresh KV cache
    kv         engine with a fresh KV cache - engine as recorded
    lag        trainer under the current weights - trainer under the weights of the token

The KL is the figure mismatch_kl: the mean over tokens of the estimator k3 (losses.py), exp(x) - 1 - x of the
log-ratio x. Each token's k3 is divided among the parts of x in their proportion, so what the causes add to
the KL adds up to it. A part against the others is negative.
"""

import numpy as np
from numpy.typing import NDArray

CAUSES = ("numerics", "kv", "lag")


def kl_by_cause(parts: NDArray[np.float64]) -> dict[str, float]:
    """Return the KL in nats a token, and what each cause adds to it. `parts`: [len(CAUSES), num_tokens]."""
    x = parts.sum(0)
    weights = np.divide(np.expm1(x), x, out=np.ones_like(x), where=x != 0) - 1  # k3(x) / x
    added = (parts * weights).mean(1).tolist()
    return {"kl": float((np.expm1(x) - x).mean()), **dict(zip(CAUSES, added, strict=True))}
