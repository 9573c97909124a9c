"""TRL's side of trl_peer.py; runs under the interpreter of .venv-trl, so it imports nothing of tailrace.

    python -P trl_grpo.py train|evaluate SPEC.json RESULT.json

train     GRPOTrainer on the prompts of the spec, in their order. Writes the end of each step, the seconds of
          each part until then, and the tokens and rewards of each step; saves the model.
evaluate  writes the share of held-out prompts whose greedy completion has the answer as its last number.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parents[1] / "examples" / "smollm2"))
from rewards import near  # noqa: E402

Spec = dict[str, Any]


class Marks(TrainerCallback):
    """The end of each step, and the seconds of each part until then."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps: list[dict[str, Any]] = []

    def timed(self, owner: object, name: str, part: str) -> None:
        """Count the seconds of a method in a part."""
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = inner(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            return found

        setattr(owner, name, outer)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds["optimizer"] -= time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds["optimizer"] += time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"end_s": time.perf_counter(), "parts": dict(self.seconds)})


def train(spec: Spec) -> Spec:
    batch, dtype = spec["settings"]["batch"], spec["settings"]["dtype"]
    weights = "bfloat16" if dtype == "pure bfloat16" else "float32"
    kwargs = {"dtype": weights, "attn_implementation": spec["settings"]["attention"]}
    config = GRPOConfig(
        output_dir=spec["folder"],
        max_steps=spec["steps"],
        seed=spec["seed"],
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=spec["samples"] // batch,
        shuffle_dataset=False,
        bf16=dtype == "autocast",
        use_cpu=True,
        model_init_kwargs=kwargs,
        gradient_checkpointing=spec["settings"].get("checkpointing", False),
        use_transformers_continuous_batching=spec["settings"].get("continuous", False),
        cache_implementation=spec["settings"].get("cache"),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    marks, batches = Marks(), []

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        found = [near(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]
        batches.append({"tokens": sum(map(len, completion_ids)), "rewards": found})
        return found

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    rows = Dataset.from_list(spec["rows"])
    trainer = GRPOTrainer(spec["model"], reward, config, rows, processing_class=tokenizer, callbacks=[marks])
    marks.timed(trainer, "_generate", "generation")
    marks.timed(trainer, "compute_loss", "forward")
    marks.timed(trainer.accelerator, "backward", "backward")
    trainer.train()
    trainer.save_model(spec["folder"])
    return {"steps": [mark | batch for mark, batch in zip(marks.steps, batches, strict=True)]}


def evaluate(spec: Spec) -> Spec:
    """Computes in bfloat16, in which tailrace saves its models."""
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    chats = [row["prompt"] for row in spec["rows"]]
    asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    encoded = tokenizer.apply_chat_template(chats, **asked)
    with torch.inference_mode():
        found = model.generate(**encoded, max_new_tokens=spec["max_tokens"], do_sample=False)
    texts = tokenizer.batch_decode(found[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    solved = [near(text, row["answer"]) == 1.0 for text, row in zip(texts, spec["rows"], strict=True)]
    return {"accuracy": sum(solved) / len(solved)}


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(spec["threads"])
    result = {"train": train, "evaluate": evaluate}[sys.argv[1]](spec)
    Path(sys.argv[3]).write_text(json.dumps(result))
