"""The check that processes which divide layers compute the gradients of one process.

A wrong style of a layer changes gradients without an error. So before the model is loaded, a small copy of
its architecture with random weights is trained on three sequences in the run's own meshes and in each process
alone: loss and every parameter's gradient must agree.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.models.causal_lm import FILES_ALONE
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import Ranks, gather
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.plans import KEY, OF_EXPERTS
from tailrace.errors import ConfigError
from tailrace.types import SampleId

TOLERANCE = 1e-5
"""Share of a parameter's largest gradient by which it may differ; correct ones differ by some 1e-6."""
LEAST_SCALE = 1e-4
"""Gradients are compared with this share of the largest of all parameters at least: some are zero."""
NUM_TOKENS, NUM_PROMPT = 64, 16
VOCABULARY = 64
"""Tokens of the vocabulary, for each process."""
LossAndGradients = tuple[float, Mapping[str, Tensor]]
"""The loss, and the whole gradient of each parameter."""


class Equality:
    """The comparison of processes that divide layers with one that does not."""

    @staticmethod
    def check(path: Path, settings: TrainerSettings, ranks: Ranks) -> None:
        """Raises a ConfigError in all processes of a replica if a small copy of a folder's architecture has
        other gradients in them than in one, or cannot be made."""
        num, remedy = settings.tensor_parallel, "set it to 1, and trainer.ranks to more"
        try:
            model = small_copy(AutoConfig.from_pretrained(path, **FILES_ALONE), num)
        except Exception as why:  # of any architecture
            problem = f"no small copy of the architecture can be made ({type(why).__name__}: {why})"
            raise ConfigError(KEY, num, " ".join(problem.split())[:400], remedy) from why
        own = settings.changed(dtype="float32", lora=None, max_tokens_per_microbatch=NUM_TOKENS)
        wanted = _outcome(PolicyModel(copy.deepcopy(model), own, temperature=0.8), Ranks())
        found = _outcome(PolicyModel(model, own, temperature=0.8, ranks=ranks), ranks)
        errors = relative_errors(found, wanted)
        largest = torch.tensor([*errors.values()], device=settings.device).nan_to_num(torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, ranks.group)
        error, number = largest.max(0)
        if not error <= TOLERANCE:
            name = [*errors][int(number)]
            problem = f"{name} of a small copy of the model differs by {float(error):.1g} from one process"
            raise ConfigError(KEY, num, problem, remedy)


def small_copy(config: PreTrainedConfig, num: int) -> PreTrainedModel:
    """A model of an architecture with random weights, of the least size that `num` processes can divide: two
    layers, or one of each type."""
    heads = config.num_attention_heads
    grouped = (getattr(config, "num_key_value_heads", None) or heads) < heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    types = [*dict.fromkeys(getattr(config, "layer_types", None) or ())]
    types = types * 2 if len(types) == 1 else types
    sizes = {
        "num_attention_heads": num * (1 + grouped),
        "num_key_value_heads": num,
        "hidden_size": num * (1 + grouped) * head_size,
        "intermediate_size": 16 * num,
        **{name: 4 * num for name in OF_EXPERTS if hasattr(config, name)},
        "vocab_size": VOCABULARY * num,
        "num_hidden_layers": len(types) or 2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    small = type(config).from_dict(config.to_dict() | sizes | ({"layer_types": types} if types else {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
                else:
                    parameter.uniform_(0.5, 1.5)  # a bias that is added twice would be seen
    return model


def relative_errors(found: LossAndGradients, wanted: LossAndGradients) -> dict[str, float]:
    """The largest difference of the loss and of each gradient, as a share of its largest value."""
    (loss, gradients), (expected, of_one) = found, wanted
    least = LEAST_SCALE * max(float(each.abs().max()) for each in of_one.values())
    errors = {"loss": abs(loss - expected) / abs(expected)}
    for name, gradient in of_one.items():
        difference = float((gradients[name] - gradient).abs().max())
        errors[name] = difference / max(least, float(gradient.abs().max()))
    return errors


def _outcome(policy: PolicyModel, ranks: Ranks) -> LossAndGradients:
    """Add up the gradients of three sequences, a micro-batch each."""
    vocabulary = len(policy.model.get_output_embeddings().weight)
    loss = torch.zeros((), dtype=torch.float64, device=policy.device)
    weights = torch.linspace(0.5, 1.5, NUM_TOKENS - NUM_PROMPT, device=policy.device)
    samples = []
    for number, step in enumerate((7, 11, 13)):
        ids = [(i + 1) * step % vocabulary for i in range(NUM_TOKENS)]
        prompt, completion = ids[:NUM_PROMPT], ids[NUM_PROMPT:]
        samples.append(
            TrainingSample(SampleId(number, 0, 0), prompt, completion, [0.0] * len(completion), 0.0)
        )
    for batch in policy.own_micro_batches(samples):
        logprobs = policy.logprobs(batch).logprobs
        weighted = (logprobs * (0 if batch.is_filler else weights)).sum()
        weighted.backward()  # type: ignore[no-untyped-call]
        loss += weighted.detach()
    ranks.sum_over_shards(loss)
    gradients = {n: gather(p.grad) for n, p in policy.parameters().items() if p.grad is not None}
    return float(loss), gradients
