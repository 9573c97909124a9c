"""TRL's side of benchmarks/trainer.py. It runs in an environment with trl and without tailrace.

It reads one batch size per line from stdin, does one optimizer step on the batch of the given file in
micro-batches of that many rows, and answers with one line of JSON.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

Inputs = dict[str, torch.Tensor]


def make_trainer(batch: dict[str, Any]) -> GRPOTrainer:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(batch["vocabulary"])}, unk_token="w0"))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(batch["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="grpo",
            epsilon=batch["clip"],
            temperature=1.0,
            learning_rate=batch["learning_rate"],
            max_grad_norm=batch["max_grad_norm"],
            num_generations=batch["group_size"],
            per_device_train_batch_size=batch["group_size"],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w1"] * 8}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0"),
    )
    trainer.create_optimizer()
    trainer.model.train()
    return trainer


def make_inputs(batch: dict[str, Any]) -> Inputs:
    """The whole step's batch, padded as TRL pads it: prompts left, completions right."""
    prompt_ids, prompt_mask = padded(batch["prompt_ids"], left=True)
    completion_ids, completion_mask = padded(batch["completion_ids"], left=False)
    recorded, _ = padded(batch["logprobs"], left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": recorded,
        "advantages": torch.tensor(batch["advantages"]),
    }


def padded(rows: list[list[Any]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, longest] and its mask."""
    longest = max(map(len, rows))
    values, mask = [], []
    for row in rows:
        gap = [0] * (longest - len(row))
        values.append(gap + row if left else row + gap)
        mask.append(gap + [1] * len(row) if left else [1] * len(row) + gap)
    return torch.tensor(values), torch.tensor(mask)


def step(trainer: GRPOTrainer, inputs: Inputs, batch_size: int) -> float:
    """Loss, backward, clipping and optimizer step, in the order of transformers' Trainer."""
    num_samples = len(inputs["prompt_ids"])
    trainer.current_gradient_accumulation_steps = num_samples // batch_size
    total = 0.0
    for start in range(0, num_samples, batch_size):
        rows = {name: tensor[start : start + batch_size] for name, tensor in inputs.items()}
        loss = trainer.compute_loss(trainer.model, rows)
        trainer.accelerator.backward(loss)
        total += loss.item()
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return total


def main() -> None:
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    batch = json.loads(Path(sys.argv[1]).read_text())
    trainer, inputs = make_trainer(batch), make_inputs(batch)
    for line in sys.stdin:
        started = time.perf_counter()
        loss = step(trainer, inputs, int(line))
        answer = {"seconds": time.perf_counter() - started, "loss": loss}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
