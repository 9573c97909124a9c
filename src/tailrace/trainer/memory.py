"""The memory that one rank of the trainer needs, from the shape of the model. Imports no torch.

The phases of a rank, one of which is the largest: reading the folder, a pass over a micro-batch of
`max_tokens_per_microbatch` tokens, publishing, and exporting a checkpoint. benchmarks/memory.py measures.
"""

from dataclasses import dataclass

from tailrace.memory import ITEM_BYTES, ModelShape, ProcessMemory, largest_phase
from tailrace.trainer.base import TrainerSettings

LOGITS_AT_ONCE = 1 << 26
"""As logprobs.CHUNK_ELEMENTS."""
LOGIT_BYTES = 20
"""Of one logit: scaled, normalised, exponentiated and their gradients, in float32."""
PROCESS_BYTES = 450 * 2**20
"""A process that has imported torch and transformers."""
CUDA_BYTES = 600 * 2**20
"""CUDA's context and the workspaces of its libraries."""


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """What the trainer does beside training the policy.

    Args:
        adapter_parameters: of LoRA; None: all parameters are trained.
        published_bytes: size of one publication.
        kept_publications: in the memory of the trainer's process.
        has_critic: a critic of the size of the model.
        keeps_old_policy: a copy of the published weights.
    """

    adapter_parameters: int | None = None
    published_bytes: int = 0
    kept_publications: int = 0
    has_critic: bool = False
    keeps_old_policy: bool = False


def trainer_memory(shape: ModelShape, settings: TrainerSettings, work: TrainerWork) -> ProcessMemory:
    """Estimate the memory of rank 0 of a replica: the other ranks need less for loading and publishing."""
    ranks, size = settings.ranks, ITEM_BYTES[settings.dtype]
    is_sharded = ranks > 1 or settings.cpu_offload
    trained = shape.num_parameters if work.adapter_parameters is None else work.adapter_parameters
    whole = 4 * shape.num_parameters
    kept = {
        "weights": (whole + (4 * trained if work.adapter_parameters else 0)) // ranks,
        "gradient": 4 * trained // ranks,
        "optimizer": 8 * trained // ranks,
        "critic": 4 * whole // ranks if work.has_critic else 0,
        "old policy": 4 * trained // ranks if work.keeps_old_policy else 0,
    }
    computing = _pass(shape, settings, size, is_sharded, is_trained=work.adapter_parameters is None)
    host = {"process": PROCESS_BYTES, "publications": _publications(work, trained)}
    copied = is_sharded or work.adapter_parameters is not None or settings.device != "cpu"
    publishing = {"new publication": work.published_bytes}
    exporting = {"checkpoint": whole if copied else 0}
    loading = {"whole model": whole if is_sharded else 0, "files": shape.stored_bytes}
    advice = (
        "lower trainer.max_tokens_per_microbatch, train with [trainer.lora], or shard over more trainer.ranks"
    )
    if settings.device == "cpu":
        phases = {
            "load": {"process": PROCESS_BYTES, "weights": kept["weights"]} | loading,
            "pass": host | kept | computing,
            "publish": host | kept | publishing,
            "export": host | kept | exporting,
        }
        return ProcessMemory("trainer", "cpu", largest_phase(phases), {}, ranks * settings.replicas, advice)
    resident = {} if settings.cpu_offload else kept
    offloaded = kept if settings.cpu_offload else {}
    others = {
        "load": {"process": PROCESS_BYTES, "whole model": whole} | {"files": shape.stored_bytes},
        "publish": host | offloaded | publishing,
        "export": host | offloaded | exporting,
    }
    on_device = {"CUDA": CUDA_BYTES} | resident | computing
    device, num = settings.device, ranks * settings.replicas
    return ProcessMemory("trainer", device, _present(on_device), largest_phase(others), num, advice)


def _publications(work: TrainerWork, trained: int) -> int:
    """The last one in bfloat16, for the share of changed weights, and those that the transport keeps."""
    return work.published_bytes // 2 + work.kept_publications * work.published_bytes


def _pass(
    shape: ModelShape, settings: TrainerSettings, size: int, is_sharded: bool, *, is_trained: bool
) -> dict[str, int]:
    """The largest moment of a forward and backward pass: at the head, or in the backward pass of a block."""
    tokens = settings.max_tokens_per_microbatch
    block, outside = shape.block_parameters, shape.outside_parameters
    activations = tokens * block_activation_bytes(shape, size)
    kept = tokens * shape.hidden_size * size * shape.num_layers
    if not settings.activation_checkpointing:
        kept = activations * shape.num_layers
        activations = 0
    rows = max(1, min(tokens, LOGITS_AT_ONCE // shape.vocabulary))
    logits = rows * shape.vocabulary * LOGIT_BYTES
    if is_sharded:  # gathered in the type of the computation; gradients are reduced in float32
        at_head = {"gathered": size * (outside + block), "new gradient": size * outside if is_trained else 0}
        in_block = {
            "gathered": size * (outside + 3 * block),
            "new gradient": (size * (outside + block) + 4 * block) if is_trained else 0,
        }
        at_end = {"gathered": size * outside, "new gradient": (size + 8) * outside if is_trained else 0}
    else:  # autocast keeps copies of all weights
        cast = {"gathered": 0 if size == 4 else size * shape.num_parameters}
        at_head = cast | {"new gradient": 4 * shape.tensor_parameters if is_trained else 0}
        in_block = at_end = at_head
    return largest_phase(
        {
            "head": {"activations": kept, "logits": logits} | at_head,
            "block": {"activations": kept + activations} | in_block,
            "end": at_end,
        }
    )


def block_activation_bytes(shape: ModelShape, size: int) -> int:
    """Bytes that one block keeps for the backward pass of one token.

    Norms keep their input in float32 and their output; attention its queries, keys, values and output; the
    feed-forward layer its input, both branches, the activation and the product.

    Args:
        size: bytes of a number of the computation.
    """
    hidden, heads = shape.hidden_size, shape.query_size + shape.kv_size
    norms = 2 * (8 + 2 * size) * hidden
    rotated = (8 + 4 * size) * heads
    attention = size * (2 * shape.query_size + 2 * shape.kv_size)
    feed_forward = size * (hidden + 4 * shape.mlp_size)
    return norms + rotated + attention + feed_forward


def _present(parts: dict[str, int]) -> dict[str, int]:
    return {name: num for name, num in parts.items() if num}
