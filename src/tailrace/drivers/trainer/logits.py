"""How many logits are held at once, and their memory, without torch."""

from tailrace.contracts.memory import LOGIT_BYTES, TRANSFORMERS_BYTES, ModelShape, ProcessMemory
from tailrace.contracts.trainer import TrainerSettings

LOGITS = 1 << 26, 1 << 28
"""Held at once, least and most: 256 MiB and 1 GiB in float32."""


def logit_rows(tokens: int, vocabulary: int) -> int:
    """Tokens of a micro-batch whose logits are held at once: an eighth, within `LOGITS`. Each chunk casts the
    head and adds to its gradient, which moves as many bytes as the logits of some 500 tokens."""
    least, most = (max(1, limit // vocabulary) for limit in LOGITS)
    return min(tokens, max(least, min(tokens // 8, most)))


def logit_bytes(tokens: int, shape: ModelShape, parts: int = 1) -> int:
    """Bytes of the logits that a micro-batch holds at once, where a process has one of so many parts of the
    vocabulary."""
    vocabulary = shape.vocabulary // parts
    return LOGIT_BYTES * logit_rows(tokens, vocabulary) * vocabulary


def reference_memory(name: str, device: str, trainer: TrainerSettings, shape: ModelShape) -> ProcessMemory:
    """Estimate the memory of a process that computes log-probs of the trainer's micro-batches."""
    logits = logit_bytes(trainer.max_tokens_per_microbatch, shape)
    parts = {"weights": 4 * shape.num_parameters, "logits": logits}
    return ProcessMemory(name, device, parts, {"process": TRANSFORMERS_BYTES})
