"""What TRL 1.16 makes of one small batch: losses and gradients, as the reference of ours.

    python tests/drivers/trainer/trl_reference.py        with trl==1.16.0 installed; writes trl_reference.json

The batch has unequal prompts and completions, recorded log-probs far enough from the model's that the
clip acts on both sides, unequal clip bounds and a temperature. Of each gradient every third entry is kept.
"""

import json
import random
import tempfile
from array import array
from base64 import b64decode, b64encode
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

FIXTURE = Path(__file__).with_suffix(".json")
TEMPERATURE, CLIP_LOW, CLIP_HIGH = 0.9, 0.2, 0.28
MAX_TOKENS, CAP, KL_COEF = 20, 1.5, 0.1
KEPT = 3


class Case(NamedTuple):
    """One algorithm, as both say it."""

    ours: dict[str, Any]
    """Of [algorithm], beside the clip bounds."""
    trl: dict[str, Any]
    """Of its config, beside the same."""
    vllm: str = ""
    """TRL's importance sampling mode; the old policy is then recomputed. Empty: it is the recorded one."""
    beta: float = 0.0
    """Of the KL. Set late: a trainer that is made with one looks for a reference model to load."""
    trainer: str = "GRPO"
    """RLOO's old policy is the current one; its loss has another value than ours and the same gradient. IWOPD
    is on-policy distillation, whose teacher is the reference; its weights by position are off."""


CASES = {
    "sample_mean": Case({}, {"loss_type": "grpo"}),
    "token_mean": Case({"normalize": "token_mean"}, {"loss_type": "bnpo"}),
    "dapo": Case({"name": "dapo"}, {"loss_type": "dapo"}),
    "dr_grpo": Case({"name": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "gspo": Case({"name": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    # TRL gives the bound itself, not how far it is above 1.
    "cispo": Case({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1 + CLIP_HIGH}),
    "kl": Case({"kl_coef": KL_COEF}, {"loss_type": "grpo", "use_bias_correction_kl": False}, beta=KL_COEF),
    "kl_corrected": Case(
        {"kl_coef": KL_COEF, "kl_bias_correction": True}, {"loss_type": "grpo"}, beta=KL_COEF
    ),
    "truncate": Case({"correction": "truncate"}, {"loss_type": "grpo"}, "token_truncate"),
    "mask": Case({"correction": "mask"}, {"loss_type": "grpo"}, "token_mask"),
    "rloo": Case({"name": "rloo"}, {"beta": 0.0}, trainer="RLOO"),
    "distillation": Case({"name": "distillation", "correction": "none"}, {}, trainer="IWOPD"),
    "sequence": Case({"correction": "sequence"}, {"loss_type": "grpo"}, "sequence_truncate"),
}


def reference_model() -> PreTrainedModel:
    """Two layers whose weights are a formula, so that they need not be stored."""
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 1.7 + number)
            parameter.copy_((wave * 0.3 + (parameter.ndim == 1)).view_as(parameter))
    return model


def reference_samples() -> list[dict[str, Any]]:
    """Six samples as plain values, by the names of TrainingSample."""
    chance = random.Random(5)
    samples = []
    for prompt_length, length in ((3, 9), (3, 2), (3, 5), (5, 1), (5, 14), (5, 4)):
        samples.append(
            {
                "prompt_ids": [chance.randrange(2, 12) for _ in range(prompt_length)],
                "completion_ids": [chance.randrange(2, 12) for _ in range(length)],
                "behavior_logprobs": [round(chance.uniform(-4.0, -1.0), 3) for _ in range(length)],
                "advantage": round(chance.gauss(0, 1), 3),
            }
        )
    for sample in samples:
        sample["reference_logprobs"] = [
            logprob + chance.choice((-0.5, 0.5)) for logprob in sample["behavior_logprobs"]
        ]
    return samples


def padded(rows: list[list[Any]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, longest] and its mask."""
    longest = max(map(len, rows))
    values, mask = [], []
    for row in rows:
        gap = [0] * (longest - len(row))
        values.append(gap + row if left else row + gap)
        mask.append(gap + [1] * len(row) if left else [1] * len(row) + gap)
    return torch.tensor(values), torch.tensor(mask)


def trl_loss_and_gradient(case: Case) -> tuple[float, list[float]]:
    """Run TRL on the batch as one optimizer step would; of the gradient what is kept."""
    if case.trainer == "IWOPD":
        return _distilled()
    trainer = _trl_trainer(case)
    samples = reference_samples()
    prompt_ids, prompt_mask = padded([s["prompt_ids"] for s in samples], left=True)
    completion_ids, completion_mask = padded([s["completion_ids"] for s in samples], left=False)
    recorded, _ = padded([s["behavior_logprobs"] for s in samples], left=False)
    reference, _ = padded([s["reference_logprobs"] for s in samples], left=False)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": None if case.vllm else recorded,
        "ref_per_token_logps": reference,
        "advantages": torch.tensor([s["advantage"] for s in samples]),
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = case.beta
    model = trainer.model.eval()
    if case.trainer == "RLOO":
        inputs["old_logps"] = (_logprobs(trainer, inputs) * completion_mask).sum(1)
    if case.vllm:
        trainer.use_vllm = True  # of which the loss asks no more than whether there are weights
        difference = (_logprobs(trainer, inputs) - recorded) * completion_mask
        inputs["importance_sampling_ratio"] = _importance_sampling_ratio(case.vllm, difference)
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return loss.item(), _kept_gradient(trainer.model)


def _kept_gradient(model: PreTrainedModel) -> list[float]:
    gradients = {name: p.grad.flatten().tolist() for name, p in model.named_parameters()}
    return [value for name in sorted(gradients) for value in gradients[name]][::KEPT]


def _distilled() -> tuple[float, list[float]]:
    """The loss of a trainer that would load a teacher: its method, with what that reads of the trainer."""
    from trl.experimental.iw_opd import IWOPDTrainer

    model, samples = reference_model().eval(), reference_samples()
    prompts, prompt_mask = padded([s["prompt_ids"] for s in samples], left=True)
    ids, mask = padded([s["completion_ids"] for s in samples], left=False)
    recorded, teachers = (
        padded([s[name] for s in samples], left=False)[0]
        for name in ("behavior_logprobs", "reference_logprobs")
    )
    attended = torch.cat([prompt_mask, mask], dim=1)
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    whole = torch.cat([prompts, ids], dim=1)
    logits = model(input_ids=whole, attention_mask=attended, position_ids=positions).logits
    metrics = {"eval": defaultdict(list), "train": defaultdict(list)}
    own = SimpleNamespace(
        temperature=TEMPERATURE, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, model=model, _metrics=metrics
    )
    labels = ids.masked_fill(mask == 0, -100)
    asked = logits[:, prompts.shape[1] - 1 : -1], ids, labels, teachers, recorded, mask.sum()
    loss = IWOPDTrainer._compute_iw_opd_loss(own, *asked)
    loss.backward()
    return loss.item(), _kept_gradient(model)


@torch.no_grad()
def _logprobs(trainer: Any, inputs: Any) -> torch.Tensor:
    """[N, longest] of the model as it is."""
    logprobs, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_mask"].size(1),
    )
    return logprobs


def _importance_sampling_ratio(mode: str, difference: torch.Tensor) -> torch.Tensor:
    """As in TRL's _generate_and_score_completions, which would generate with vLLM first."""
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=CAP) if mode.endswith("truncate") else ratio.masked_fill(ratio > CAP, 0.0)


def _trl_trainer(case: Case) -> Any:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(12)}, unk_token="w0"))
    return getattr(trl, f"{case.trainer}Trainer")(
        model=reference_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=getattr(trl, f"{case.trainer}Config")(
            **{
                "output_dir": tempfile.mkdtemp(),
                "use_cpu": True,
                "report_to": [],
                "bf16": False,
                "epsilon": CLIP_LOW,
                "epsilon_high": CLIP_HIGH,
                "temperature": TEMPERATURE,
                "max_completion_length": MAX_TOKENS,
                "per_device_train_batch_size": 6,
                "num_generations": 3,
                **case.trl,
            }
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * 8}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0"),
    )


def stored() -> dict[str, tuple[float, torch.Tensor]]:
    """Loss and kept gradient of each case."""
    return {
        name: (case["loss"], torch.tensor(array("f", b64decode(case["gradient"])).tolist()))
        for name, case in json.loads(FIXTURE.read_text()).items()
    }


def main() -> None:
    """Write the fixture."""
    fixture = {}
    for name, case in CASES.items():
        loss, gradient = trl_loss_and_gradient(case)
        packed = b64encode(array("f", gradient).tobytes()).decode()
        fixture[name] = {"loss": round(loss, 9), "gradient": packed}
    FIXTURE.write_text(json.dumps(fixture) + "\n")


if __name__ == "__main__":
    main()
