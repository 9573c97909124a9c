"""The model that is trained: a Hugging Face causal LM, run on packed micro-batches.

Weights are float32; bfloat16 is a matter of the computation (autocast). There is no dropout: what is
trained is the policy that generated. Any architecture whose attention goes through transformers'
AttentionInterface will do, and whether it does is tried out on a few tokens when it is loaded.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.errors import ConfigError
from tailrace.trainer.attention import PACKED
from tailrace.trainer.flat import halves, num_elements
from tailrace.trainer.fused import can_fuse, fused_hidden_states
from tailrace.trainer.logprobs import TokenLogProbs, token_logprobs
from tailrace.trainer.packing import Family, MicroBatch, by_prompt, pack
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def hidden_states(model: PreTrainedModel, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """[C, D]: the last hidden states of a model without its head, at the places that predict a token.

    batch: where `can_fuse` is false, of families of one.
    """
    if can_fuse(model, dtype):
        return fused_hidden_states(model, batch)[batch.predictors]
    with torch.autocast(batch.input_ids.device.type, dtype, enabled=dtype != torch.float32):
        hidden: Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=batch.boundaries,
            cu_seq_lens_k=batch.boundaries,
            max_length_q=batch.max_length,
            max_length_k=batch.max_length,
        ).last_hidden_state[0]
    return hidden[batch.predictors]


class Policy:
    """Log-probs of completion tokens under the current weights."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = model.to(device).eval()
        self.temperature = temperature
        self.device = device
        self._dtype = dtype
        matrices, others = halves(dict(self.model.named_parameters()))
        self._parameters = matrices | others
        if not self._runs_packed():
            raise ConfigError(
                "model.path",
                model.config.name_or_path,
                f"an architecture of type {model.config.model_type!r} does not run packed",
                "choose one of the Llama or Qwen kind",
            )

    @classmethod
    def load(cls, path: Path, *, temperature: float, device: torch.device, dtype: torch.dtype) -> "Policy":
        """Read a Hugging Face folder.

        Raises:
            ConfigError: the architecture cannot run packed.
        """
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cls(model, temperature=temperature, device=device, dtype=dtype)

    def batches(self, samples: Sequence[TrainingSample], budget: int) -> list[MicroBatch]:
        """All samples with a completion, in micro-batches of at most `budget` fed tokens.

        Where the decoder is ours, a prompt that several samples have is computed once.
        """
        alone: list[Family] = [[sample] for sample in samples]
        families = by_prompt(samples) if can_fuse(self.model.base_model, self._dtype) else alone
        return [MicroBatch.of(bin, self.device) for bin in pack(families, budget)]

    def logprobs(self, batch: MicroBatch) -> TokenLogProbs:
        """[C] each, in the order of the batch's completion tokens."""
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden_states(self.model.base_model, batch, self._dtype),
            head.weight,
            head.bias,
            batch.targets,
            temperature=self.temperature,
            dtype=self._dtype,
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """By their Hugging Face names, tied ones once, in the order in which a vector holds them."""
        return self._parameters

    @cached_property
    def attention_cost(self) -> float:
        """Of a token that is fed, for each token of its sequence; all else that it costs is one. Operations
        as PaLM counts them (Chowdhery et al. 2022, appendix B); half of attention's is masked."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        return float(width / num_elements(list(self._parameters.values())))

    @torch.no_grad()
    def _runs_packed(self) -> bool:
        """Whether two packed sequences give what the model's own forward gives for each alone.

        They differ where an architecture mixes packed sequences, or changes its logits after the head.
        """
        vocabulary = len(self.model.get_output_embeddings().weight)
        ids = [i % vocabulary for i in range(1, 8)]
        samples = [
            TrainingSample(SampleId(0, 0, i), part[:1], part[1:], [0.0] * (len(part) - 1), 0.0)
            for i, part in enumerate((ids[:4], ids[3:]))
        ]
        self.model.set_attn_implementation("eager")
        alone = torch.cat([self._plain_logprobs(sample) for sample in samples])
        self.model.set_attn_implementation(PACKED)
        try:
            packed = self.logprobs(MicroBatch.of([[sample] for sample in samples], self.device)).logprobs
        except NotImplementedError:
            return False
        tolerance = 1e-3 if self._dtype == torch.float32 else 0.1
        return torch.allclose(alone, packed, atol=tolerance, rtol=tolerance)

    def _plain_logprobs(self, sample: TrainingSample) -> Tensor:
        """[num_tokens] by the model's own forward."""
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=self.device)
        logits: Tensor = self.model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        logp = (logits.float() / self.temperature).log_softmax(-1)
        return logp.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
