"""The model that is trained: a Hugging Face causal language model on packed micro-batches.

Weights are float32; bfloat16 applies to the computation (autocast). The model is in evaluation mode: without
dropout, the trained policy is the policy that generates. Any architecture whose attention goes through
transformers' AttentionInterface is supported; it is tested on a few tokens when it is loaded.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.errors import ConfigError
from tailrace.model_folder import folder_error, weights_defect
from tailrace.trainer.attention import PACKED
from tailrace.trainer.base import LoraSettings, TrainerSettings
from tailrace.trainer.batch import TrainingSample
from tailrace.trainer.logprobs import TokenLogProbs, token_logprobs
from tailrace.trainer.packing import MicroBatch, pack
from tailrace.types import SampleId

if TYPE_CHECKING:
    from tailrace.trainer.lora import Adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_model(folder: Path) -> PreTrainedModel:
    """Load a causal language model in float32.

    Raises:
        ConfigError: a file is missing or damaged, or config.json and the weights do not fit together. The
            message names the file.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers has no common error for a bad folder
        raise folder_error(folder, _defect(folder, error)) from error
    # transformers fills missing and mismatched weights with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        names = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        problem = f"does not fit the weights: {len(wrong)} are missing or have another shape ({names})"
        raise folder_error(folder, f"{folder / 'config.json'} {problem}")
    return model


def _defect(folder: Path, error: Exception) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    for file in sorted(folder.glob("*.safetensors")):
        if defect := weights_defect(file):
            return f"{file} {defect}"
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError):  # it names the file itself
        return reason
    problem = f"describes no model that can be loaded ({type(error).__name__}: {reason})"
    return f"{folder / 'config.json'} {problem}"


def hidden_states(model: PreTrainedModel, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Run a model without its head.

    Returns:
        [C, D]: the last hidden states at the positions that predict a completion token.
    """
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


class PolicyModel:
    """Computes log-probs of completion tokens under the current weights.

    Args:
        model: with its head, in float32.
        dtype: precision of the computation.
        lora: train an adapter in place of the weights.

    Raises:
        ConfigError: the architecture cannot run packed, or has no layers for the adapter.
    """

    adapter: "Adapter | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraSettings | None = None,
    ) -> None:
        self.model = model.to(device).eval()
        self.temperature, self.device, self._dtype = temperature, device, dtype
        if not self._runs_packed():
            raise ConfigError(
                "model.path",
                model.config.name_or_path,
                f"an architecture of type {model.config.model_type!r} does not run packed",
                "choose one of the Llama or Qwen kind",
            )
        if lora:
            from tailrace.trainer.lora import Adapter  # peft is an extra

            self.model.requires_grad_(False)
            self.adapter = Adapter(self.model, lora)
        self._parameters = self.adapter.parameters() if self.adapter else dict(self.model.named_parameters())

    @classmethod
    def load(cls, path: Path, settings: TrainerSettings, *, temperature: float) -> "PolicyModel":
        """Load a Hugging Face folder.

        Raises:
            ConfigError: the folder is incomplete or damaged, or the architecture cannot run packed.
        """
        device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
        model, lora = read_model(path), settings.lora
        return cls(model, temperature=temperature, device=device, dtype=dtype, lora=lora)

    def micro_batches(self, samples: Sequence[TrainingSample], max_tokens: int) -> list[MicroBatch]:
        """Pack all samples with a completion into micro-batches of at most `max_tokens` input tokens."""
        return [MicroBatch.of(bin, self.device) for bin in pack(samples, max_tokens)]

    def logprobs(self, batch: MicroBatch) -> TokenLogProbs:
        """Compute log-probs and entropies of the batch's completion tokens: [C] each."""
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
        """What is trained: the parameters by their Hugging Face names, or those of the adapter. Tied
        parameters occur once."""
        return self._parameters

    def weights(self) -> Mapping[str, Tensor]:
        """All weights by their Hugging Face names, the adapter added. Without one they are no copies."""
        if self.adapter:
            return self.adapter.merged()
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside the block the model is the one that LoRA began with."""
        return self.adapter.off() if self.adapter else nullcontext()

    @torch.no_grad()
    def _runs_packed(self) -> bool:
        """Compare two packed sequences with the model's own forward pass of each. They differ if the
        architecture mixes packed sequences, or changes its logits after the head."""
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
            packed = self.logprobs(MicroBatch.of(samples, self.device)).logprobs
        except NotImplementedError:
            return False
        tolerance = 1e-3 if self._dtype == torch.float32 else 0.1
        return torch.allclose(alone, packed, atol=tolerance, rtol=tolerance)

    def _plain_logprobs(self, sample: TrainingSample) -> Tensor:
        """[num_tokens] by the model's own forward pass."""
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=self.device)
        logits: Tensor = self.model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        logp = (logits.float() / self.temperature).log_softmax(-1)
        return logp.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
