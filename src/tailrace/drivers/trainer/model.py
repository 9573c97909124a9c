"""The model that is trained: a Hugging Face causal language model on packed micro-batches.

Weights are float32; bfloat16 applies to the computation (autocast). The model is in evaluation mode: without
dropout, the trained policy is the policy that generates.

An architecture is tested on three sequences when it is loaded, and gets the fastest `Packing` whose log-probs
are its own. Packed are those whose attention goes through transformers' AttentionInterface. A layer that
carries a state from token to token needs the boundaries, as `cu_seq_lens_q` or `seq_idx`, and no context is
shared then: transformers' own layers heed them on GPUs with the kernels of fla and causal-conv1d, and ignore
them on a CPU. All other models compute one sequence at a time, by their own forward pass.

The logits of C tokens are [C, V] and would exceed everything else in memory. They are computed for one chunk
of rows at a time, and computed again in the backward pass (activation checkpointing).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import DTYPE
from tailrace.drivers.models.causal_lm import (
    Head,
    backbone,
    buffers_of,
    length_dependent_ropes,
    own_head,
    read_model,
    read_shape,
    short_windows,
)
from tailrace.drivers.trainer.attention import use_attention
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import DTYPES, Ranks, blocks, gather, recompute_activations, shard
from tailrace.drivers.trainer.logits import logit_rows
from tailrace.drivers.trainer.packing import MicroBatch, Packing, pack, share
from tailrace.errors import ConfigError
from tailrace.types import SampleId

if TYPE_CHECKING:
    from tailrace.drivers.trainer.lora import Adapter


class Columns(NamedTuple):
    """The columns of the logits that a process computes: those from `first` on, of a vocabulary that the
    processes of a group divide."""

    group: ProcessGroup
    first: int


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies of C tokens."""

    logprobs: Tensor
    """[C] float32, differentiable."""
    entropy: Tensor
    """[C] float32, not differentiable."""


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    columns: Columns | None = None,
) -> TokenLogProbs:
    """Compute log softmax(head(h) / temperature) at the targets: the distribution that was sampled from.

    Args:
        hidden: [C, D] final hidden states at the positions that predict the targets.
        targets: [C]
        vocabulary: logits of a token that the head returns.
        dtype: of the matrix products; the softmax is float32.
        columns: those that the head returns; None: all.
    """
    rows, others = logit_rows(len(targets), vocabulary), (head, temperature, dtype, columns)
    if len(targets) <= rows:
        return TokenLogProbs(*_chunk(hidden, targets, *others))
    parts = [
        checkpoint(_chunk, *chunk, *others, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenLogProbs(torch.cat(logprobs), torch.cat(entropies))


def _chunk(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    dtype: torch.dtype,
    columns: Columns | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [rows] each."""
    with torch.autocast(hidden.device.type, dtype, enabled=dtype != torch.float32):
        logits = head(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        found: tuple[Tensor, Tensor] = _Chosen.apply(logits, targets, temperature, columns)  # type: ignore[no-untyped-call]
        return found


class _Chosen(torch.autograd.Function):
    """Log-probs of targets and entropies, [rows] float32 each, of logits, [rows, V]. The gradient,
    (1[target] - p) / temperature, is made in the memory of the probabilities p, so a forward pass has one
    backward pass: autograd would make a matrix for each operation. liger-kernel's fused linear scaled cross
    entropy returns the same, but of heads only that neither scale nor cap their logits, and has a kernel of
    its own on Hopper alone. Where several processes have parts of the columns, each makes the gradient of
    its own after three reductions of [rows]: the largest logit, the sum, and both results."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, columns: Columns | None
    ) -> tuple[Tensor, Tensor]:
        scaled = logits if temperature == 1 else logits.float() / temperature
        is_own = None
        if columns is None:
            logp = scaled.log_softmax(-1, dtype=torch.float32)
        else:
            logp = _divided_log_softmax(scaled, columns.group)
            targets = targets - columns.first
            is_own = (targets >= 0) & (targets < logits.shape[1])
            targets = targets.where(is_own, 0)
        chosen, probs = logp.gather(1, targets[:, None])[:, 0], logp.exp()
        entropy = logp.mul_(probs).sum(-1).neg()
        if columns is not None and is_own is not None:
            results = torch.stack([chosen.where(is_own, 0.0), entropy])
            dist.all_reduce(results, group=columns.group)
            chosen, entropy = results[0].clone(), results[1].clone()
        ctx.save_for_backward(probs, targets, is_own)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        probs, targets, is_own = ctx.saved_tensors
        upstream = upstream[:, None] / ctx.temperature
        at_targets = upstream if is_own is None else upstream * is_own[:, None]
        gradient = probs.mul_(-upstream).scatter_add_(1, targets[:, None], at_targets)
        return gradient.to(ctx.dtype), None, None, None


def _divided_log_softmax(logits: Tensor, group: ProcessGroup) -> Tensor:
    """log softmax over the columns of all processes, of those of this one: [rows, columns] float32."""
    largest = logits.amax(-1, keepdim=True).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = logits.float() - largest
    total = shifted.exp().sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return shifted.sub_(total.log_())


def hidden_states(model: PreTrainedModel, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Run a model without its head: [C, D], the last hidden states that predict a completion token."""
    with torch.autocast(batch.input_ids.device.type, dtype, enabled=dtype != torch.float32):
        if batch.packing is Packing.ALONE:
            sequences = torch.split(batch.input_ids, batch.lengths, 1)
            parts = [model(input_ids=ids, use_cache=False)[0][0] for ids in sequences]
            return torch.cat(parts)[batch.predictors]
        packed: dict[str, Any] = {}
        if batch.packing is Packing.SEPARATE:
            packed["seq_idx"] = torch.repeat_interleave(batch.boundaries.diff())[None].int()
        hidden: Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=batch.boundaries,
            cu_seq_lens_k=batch.key_boundaries,
            max_length_q=max(batch.lengths),
            max_length_k=max(batch.key_lengths),
            sequence_lengths=batch.lengths,
            keys=batch.keys if batch.key_lengths != batch.lengths else None,
            key_lengths=batch.key_lengths,
            **packed,
        )[0][0]
    return hidden[batch.predictors]


class LogProbs(nn.Module):
    """The computation from packed tokens to log-probs: what FSDP sees as the root of the model."""

    columns: Columns | None = None
    """None: this process has all of the vocabulary."""

    def __init__(self, model: PreTrainedModel, temperature: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.temperature, self.dtype, self.head = model, temperature, dtype, own_head(model)

    def forward(self, batch: MicroBatch) -> TokenLogProbs:
        vocabulary = len(self.model.get_output_embeddings().weight)
        found = token_logprobs(
            hidden_states(backbone(self.model), batch, self.dtype),
            self.head,
            batch.targets,
            vocabulary=vocabulary // (self.columns.group.size() if self.columns else 1),
            temperature=self.temperature,
            dtype=self.dtype,
            columns=self.columns,
        )
        return found._replace(logprobs=found.logprobs.clone())  # FSDP's hooks would be lost with a view


class PolicyModel:
    """Computes log-probs of completion tokens under the current weights. Raises a ConfigError if they would
    not be those of the architecture, or it has no layers for the adapter. `model`: with its head, in float32,
    on the CPU. With a sharded model only rank 0 needs its weights."""

    packing = Packing.SHARED
    way = ""
    """How it computes several samples, in words."""
    adapter: "Adapter | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        *,
        temperature: float,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model.eval()
        self.device, self._ranks = torch.device(settings.device), ranks or Ranks()
        self._max_tokens = settings.max_tokens_per_microbatch
        self._logprobs = LogProbs(model, temperature, DTYPES[settings.dtype])
        if self._ranks.group is None:
            model.to(self.device)
        if self._ranks.rank == 0:
            self.packing = self._exact_packing()
        self.packing = Packing(self._ranks.of_first(self.packing.value))
        use_attention(model, self.packing)
        if settings.lora:
            from tailrace.drivers.trainer.lora import Adapter  # peft is an extra

            self.adapter = Adapter(model.requires_grad_(False), settings.lora)
        if settings.activation_checkpointing:
            recompute_activations(blocks(model))
        if self._ranks.group is not None:
            shard(self._logprobs, model, self._ranks, settings)
        if self._ranks.tensor:
            vocabulary, mesh = len(model.get_output_embeddings().weight), self._ranks.tensor
            first = mesh.get_local_rank() * -(-vocabulary // mesh.size())
            self._logprobs.columns = Columns(mesh.get_group(), first)
        self._parameters = self.adapter.parameters() if self.adapter else dict(self.model.named_parameters())

    @classmethod
    def load(
        cls, path: Path, settings: TrainerSettings, temperature: float, ranks: Ranks | None = None
    ) -> "PolicyModel":
        """Load a Hugging Face folder. `ranks`: over which it is sharded; None: this process has the model.
        Raises a ConfigError if the folder is incomplete or damaged, or as the class does."""
        model = read_model(path) if ranks is None or ranks.rank == 0 else read_shape(path)
        return cls(model, settings, temperature=temperature, ranks=ranks)

    def micro_batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """Pack all samples with a token in the loss."""
        bins = pack(samples, self._max_tokens, self.packing)
        return [MicroBatch.of(bin, self.device, self.packing) for bin in bins]

    def own_micro_batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """Pack the micro-batches of this shard, with fillers."""
        rank, num_ranks = self._ranks.shard, self._ranks.num_shards
        bins = share(samples, self._max_tokens, self.packing, rank=rank, num_ranks=num_ranks)
        where = self.device, self.packing
        return [MicroBatch.of(bin, *where) if bin else MicroBatch.filler(*where) for bin in bins]

    def logprobs(self, batch: MicroBatch) -> TokenLogProbs:
        """Compute log-probs and entropies of the batch's completion tokens: [C] each. All ranks of a replica
        compute at the same time, each its own batch."""
        found: TokenLogProbs = self._logprobs(batch)
        return found

    @torch.no_grad()
    def logprobs_of(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Compute the log-probs of each sample's completion tokens, in the order of the samples."""
        found: dict[SampleId, list[float]] = {}
        for batch in self.micro_batches(samples):
            found |= zip(batch.ids, batch.by_sample(self.logprobs(batch).logprobs), strict=True)
        return [found[sample.id] if sample.completion_ids else [] for sample in samples]

    @contextmanager
    def rounded(self, dtype: DTYPE) -> Iterator[None]:
        """Inside the block log-probs are those of weights that were rounded to a type: matrix products are of
        it, and gains, biases and embeddings are rounded."""
        own, self._logprobs.dtype = self._logprobs.dtype, DTYPES[dtype]
        vectors = [each.data for each in self.model.parameters() if each.dim() == 1]
        kept = [each.clone() for each in vectors]
        for each in vectors:
            each.copy_(each.to(DTYPES[dtype]))
        embedding = self.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, __, out: out.to(DTYPES[dtype]).to(out.dtype))
        try:
            yield
        finally:
            hook.remove()
            self._logprobs.dtype = own
            for each, old in zip(vectors, kept, strict=True):
                each.copy_(old)

    def synchronize(self) -> None:
        """Wait for the device: its kernels and copies run behind the host. On a CPU nothing does."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the trained parameters by their Hugging Face names, or those of the adapter. Tied parameters
        occur once. Those of a sharded model are DTensors."""
        return self._parameters

    def factors(self) -> Mapping[str, Tensor]:
        """The parameters of the adapter; none without one."""
        return self._parameters if self.adapter else {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their Hugging Face names, the adapter added, one after another. They are copies if
        they are sharded or adapted; all ranks of the replica must take those of a sharded model."""
        if self.adapter:
            yield from self.adapter.merged()
        else:
            yield from ((name, gather(parameter)) for name, parameter in self._parameters.items())
        yield from buffers_of(self.model).items()

    def _exact_packing(self) -> Packing:
        """The fastest packing whose log-probs are the model's own. Raises a ConfigError if there is none, or
        ranks cannot share it."""
        model, ranks, defects = self.model, self._ranks.num_shards, list[str]()
        kind = f"an architecture of type {model.config.model_type!r}"
        with short_windows(model):
            for packing in Packing:
                if (defect := self._packing_defect(packing)) is None:
                    break
                defects.append(defect)
            else:
                problem, remedy = f"{kind} does not train exactly: {defects[-1]}", "choose another model"
                raise ConfigError("model.path", model.config.name_or_path, problem, remedy)
        if packing is Packing.ALONE and ranks > 1:
            problem = f"{kind} trains one sequence at a time, which ranks cannot share: {defects[0]}"
            raise ConfigError("trainer.ranks", ranks, problem, "set it to 1; trainer.replicas may be more")
        self.way = ": ".join([packing.value, *defects[:1]])
        return packing

    @torch.no_grad()
    def _packing_defect(self, packing: Packing) -> str | None:
        """Why log-probs of a packing are not the model's own, or None. Three sequences are computed, the last
        of which has the prompt of the first. They must agree with the model's own forward pass. With other
        tokens in the first and the last, the second must be the same bits. Experts are an exception: how many
        tokens each gets changes the shapes of their products."""
        model, kept = self.model, self._logprobs.dtype == torch.float32
        vocabulary = len(model.get_output_embeddings().weight)
        first, other, second = ([i * step % vocabulary for i in range(1, 65)] for step in (7, 11, 13))
        if packing is not Packing.ALONE and (rope := length_dependent_ropes(model)):
            return f"its rope type {min(rope)!r} depends on the longest sequence of a pack"
        model.set_attn_implementation("eager")
        alone = torch.cat(
            [self._plain_logprobs(second, 32), self._plain_logprobs(first[:60] + other[:4], 60)]
        )
        if not alone.isfinite().all():
            problem, remedy = "its log-probs are not finite: weights are damaged", "choose another folder"
            raise ConfigError("model.path", model.config.name_or_path, problem, remedy)
        use_attention(model, packing)
        try:
            packed, changed = (
                self._logprobs_of(
                    packing, (ids[:60], ids[60:]), (second[:32], second[32:]), (ids[:60], other[:4])
                )
                for ids in (first, other)
            )
        except Exception as why:  # of any architecture
            return f"{type(why).__name__}: {why}" if packing is Packing.ALONE else str(why)
        leak = float((packed - changed)[:32].abs().max())
        has_experts = any("expert" in name for name, _ in model.named_parameters())
        if leak > (0 if not has_experts else 1e-5 if kept else 0.1):
            return f"a packed sequence changes log-probs of the next by up to {leak:.2g}"
        if not torch.allclose(alone, packed, atol=(near := 1e-3 if kept else 0.1), rtol=near):
            return f"log-probs differ from its own by up to {(alone - packed).abs().max():.2g}"
        return None

    def _logprobs_of(self, packing: Packing, *pairs: tuple[list[int], list[int]]) -> Tensor:
        """[num_tokens] of the completions but the first. `pairs`: prompts and completions."""
        samples = [
            TrainingSample(SampleId(0, 0, i), prompt, completion, [0.0] * len(completion), 0.0)
            for i, (prompt, completion) in enumerate(pairs)
        ]
        batch = MicroBatch.of(samples, self.model.device, packing)
        return self.logprobs(batch).logprobs[len(pairs[0][1]) :]

    def _plain_logprobs(self, ids: list[int], num_prompt: int) -> Tensor:
        """[num_tokens] by the model's own forward pass."""
        given = torch.tensor([ids], device=self.model.device)
        logits: Tensor = self.model(given, use_cache=False).logits[0, num_prompt - 1 : -1]
        logp = (logits.float() / self._logprobs.temperature).log_softmax(-1)
        return logp.gather(1, given[0, num_prompt:, None])[:, 0]
