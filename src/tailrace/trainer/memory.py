"""The memory that one rank of the trainer needs, from the shape of the model. Imports no torch.

The phases of a rank, one of which is the largest: reading the folder, a pass over a micro-batch of
`max_tokens_per_microbatch` tokens, publishing, and saving a checkpoint. The copy from which a checkpoint is
written is there in all of them but the first. benchmarks/memory.py measures.
"""

from dataclasses import dataclass

from tailrace.memory import ITEM_BYTES, TRANSFORMERS_BYTES, ModelShape, ProcessMemory, largest_phase
from tailrace.trainer.base import TrainerSettings

LOGITS_AT_ONCE = 1 << 26
"""As logprobs.CHUNK_ELEMENTS."""
FILE_BYTES = 2**28
"""As state_files.FILE_BYTES. torch holds a file of a checkpoint twice while it is written."""
LOGIT_BYTES = 20
"""Of one logit: scaled, normalised, exponentiated and their gradients, in float32."""
ALLOCATOR_SHARE = 0.12
"""Host memory that was freed and that the C library keeps, as a share of what is held; measured."""
ADVICE = (
    "lower trainer.max_tokens_per_microbatch or sampling.max_completion_tokens, set "
    "trainer.async_checkpoints = false, train with [trainer.lora], or use more trainer.ranks"
)
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


def trainer_memory(
    shape: ModelShape, settings: TrainerSettings, work: TrainerWork, *, is_first: bool, longest: int = 0
) -> ProcessMemory:
    """Estimate the memory of one process of the trainer.

    Args:
        is_first: rank 0, which reads the folder, publishes and exports; the other ranks do not.
        longest: tokens of the longest sample, which may exceed a micro-batch.
    """
    ranks, has_adapter = settings.ranks, work.adapter_parameters is not None
    is_sharded = ranks > 1 or settings.cpu_offload
    trained = work.adapter_parameters if work.adapter_parameters is not None else shape.num_parameters
    whole = 4 * shape.num_parameters
    kept = {
        "weights": (whole + (4 * trained if has_adapter else 0)) // ranks,
        "gradient": 4 * trained // ranks,
        "optimizer": 8 * trained // ranks,
        "critic": 4 * whole // ranks if work.has_critic else 0,
        "old policy": 4 * trained // ranks if work.keeps_old_policy else 0,
    }
    tokens = max(settings.max_tokens_per_microbatch, longest)
    computing = _pass(shape, settings, tokens, is_sharded, is_trained=not has_adapter)
    publications = work.kept_publications * work.published_bytes
    state = (8 * trained + (3 * whole if work.has_critic else 0)) // ranks
    model = whole + (4 * trained if has_adapter else 0) if is_first else 0
    files = 2 * min(FILE_BYTES, state)
    host = {
        "process": TRANSFORMERS_BYTES,
        "publications": publications if is_first else 0,
        "checkpoint copy": state + model + files if settings.async_checkpoints else 0,
    }
    gathered = 8 * shape.tensor_parameters if is_sharded else 0
    is_copied = is_first and (is_sharded or has_adapter or settings.device != "cpu")
    phases = {
        "pass": computing,
        "publish": {"new publication": max(gathered, work.published_bytes if is_first else 0)},
        "save": {
            "checkpoint": gathered
            if settings.async_checkpoints
            else max(gathered, files + (model if is_copied else 0))
        },
    }
    read = {"whole model": whole, "files": shape.stored_bytes} if is_first else {}
    load = {"process": TRANSFORMERS_BYTES, "weights": kept["weights"]} | read
    replicas = settings.replicas
    num, name = (replicas, "trainer") if is_first else ((ranks - 1) * replicas, "trainer rank")
    if settings.device == "cpu":
        held = largest_phase({each: host | kept | phase for each, phase in phases.items()} | {"load": load})
        return ProcessMemory(name, "cpu", _with_allocator(held), {}, num, ADVICE)
    on_device = {"CUDA": CUDA_BYTES} | ({} if settings.cpu_offload else kept) | computing
    offloaded = kept if settings.cpu_offload else {}
    in_host = {each: host | offloaded | phases[each] for each in ("publish", "save")} | {"load": load}
    return ProcessMemory(
        name,
        settings.device,
        largest_phase({"pass": on_device}),
        _with_allocator(largest_phase(in_host)),
        num,
        ADVICE,
    )


def _with_allocator(parts: dict[str, int]) -> dict[str, int]:
    """With the memory that the C library has been given back and keeps."""
    held = sum(size for name, size in parts.items() if name != "process")
    return parts | {"allocator": int(ALLOCATOR_SHARE * held)}


def _pass(
    shape: ModelShape, settings: TrainerSettings, tokens: int, is_sharded: bool, *, is_trained: bool
) -> dict[str, int]:
    """The largest moment of a forward and backward pass: at the head, or in the backward pass of a block."""
    size = ITEM_BYTES[settings.dtype]
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
