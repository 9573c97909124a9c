"""What TRL 1.16's GRPOTrainer makes of one small batch: losses and gradients, as the reference of ours.

    python tests/trainer/trl_reference.py        with trl==1.16.0 installed; writes trl_reference.json

The batch has unequal prompts and completions, recorded log-probs far enough from the model's that the
clip acts on both sides, unequal clip bounds and a temperature. TRL's `grpo` is our `sample_mean`, its
`bnpo` on a whole step's batch our `token_mean`.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

FIXTURE = Path(__file__).with_suffix(".json")
TEMPERATURE, CLIP_LOW, CLIP_HIGH = 0.9, 0.2, 0.28
LOSS_TYPES = {"sample_mean": "grpo", "token_mean": "bnpo"}


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
    """Six samples as plain values: prompt_ids, completion_ids, logprobs, advantage."""
    chance = random.Random(5)
    samples = []
    for prompt_length, length in ((3, 9), (3, 2), (3, 5), (5, 1), (5, 14), (5, 4)):
        samples.append(
            {
                "prompt_ids": [chance.randrange(2, 12) for _ in range(prompt_length)],
                "completion_ids": [chance.randrange(2, 12) for _ in range(length)],
                "logprobs": [round(chance.uniform(-4.0, -1.0), 3) for _ in range(length)],
                "advantage": round(chance.gauss(0, 1), 3),
            }
        )
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


def trl_loss_and_gradients(normalize: str) -> tuple[float, dict[str, list[float]]]:
    """Run TRL on the batch as one optimizer step would."""
    trainer = _trl_trainer(LOSS_TYPES[normalize])
    samples = reference_samples()
    prompt_ids, prompt_mask = padded([s["prompt_ids"] for s in samples], left=True)
    completion_ids, completion_mask = padded([s["completion_ids"] for s in samples], left=False)
    recorded, _ = padded([s["logprobs"] for s in samples], left=False)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": recorded,
        "advantages": torch.tensor([s["advantage"] for s in samples]),
    }
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model.eval(), inputs)
    loss.backward()
    gradients = {name: p.grad.flatten().tolist() for name, p in trainer.model.named_parameters()}
    return loss.item(), gradients


def _trl_trainer(loss_type: str) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(12)}, unk_token="w0"))
    return GRPOTrainer(
        model=reference_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            report_to=[],
            bf16=False,
            beta=0.0,
            loss_type=loss_type,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            temperature=TEMPERATURE,
            per_device_train_batch_size=6,
            num_generations=3,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * 8}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0"),
    )


def main() -> None:
    """Write the fixture."""
    fixture = {}
    for normalize in LOSS_TYPES:
        loss, gradients = trl_loss_and_gradients(normalize)
        fixture[normalize] = {
            "loss": round(loss, 9),
            "gradients": {name: [round(x, 9) for x in values] for name, values in gradients.items()},
        }
    FIXTURE.write_text(json.dumps(fixture) + "\n")


if __name__ == "__main__":
    main()
