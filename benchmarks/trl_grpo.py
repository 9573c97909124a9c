"""TRL's side of trl_peer.py; runs under the interpreter of .venv-trl, so it imports nothing of tailrace.

    python -P trl_grpo.py train|evaluate SPEC.json RESULT.json

train     GRPOTrainer on the prompts of the spec, in their order. Writes the beginning, the end of each step,
          the seconds of its parts, its tokens and rewards; saves the model.
evaluate  writes the share of held-out prompts whose greedy completion has the answer as its last number.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parents[1] / "examples" / "smollm2"))
from rewards import exact, near

Spec = dict[str, Any]


class Marks(TrainerCallback):  # type: ignore[misc]
    """The end of each step, and the seconds of its parts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.begin_s = 0.0
        self.steps: list[Spec] = []

    def timed(self, owner: object, name: str, part: str) -> None:
        """Count the seconds of a method in a part."""
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.seconds[part] -= time.perf_counter()
            found = inner(*args, **kwargs)
            self.seconds[part] += time.perf_counter()
            return found

        setattr(owner, name, outer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin_s = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds["optimizer"] -= time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds["optimizer"] += time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"end_s": time.perf_counter(), "parts": dict(self.seconds)})
        self.seconds.clear()


def train(spec: Spec) -> Spec:
    """`settings`: batch (per_device_train_batch_size), dtype ("autocast": float32 weights, computed in
    bfloat16), attention, and others of GRPOConfig."""
    settings = {"batch": 16, "dtype": "autocast", "attention": "sdpa", "others": {}} | spec["settings"]
    batch, dtype = settings["batch"], settings["dtype"].replace("autocast", "float32")
    given = {"output_dir": spec["folder"], "max_steps": spec["steps"], "seed": spec["seed"]}
    given |= {"learning_rate": spec["learning_rate"], "lr_scheduler_type": "constant", "use_cpu": True}
    given |= {"loss_type": "grpo", "beta": 0.0, "epsilon": 0.2, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    given |= {"num_generations": spec["group_size"], "max_completion_length": spec["max_tokens"]}
    given |= {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": spec["groups"] * spec["group_size"] // batch,
    }
    given |= {"model_init_kwargs": {"dtype": dtype, "attn_implementation": settings["attention"]}}
    given |= {"bf16": settings["dtype"] == "autocast", "gradient_checkpointing": False}
    given |= {"shuffle_dataset": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    config = GRPOConfig(**given | settings["others"])
    marks, batches, size = Marks(), [], spec["group_size"]

    def reward(completions: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        texts = (text if isinstance(text, str) else text[0]["content"] for text in completions)
        rewarded = {"exact": exact, "near": near}[spec["reward"]]
        found = [rewarded(text, right) for text, right in zip(texts, answer, strict=True)]
        equal = [len(set(found[at : at + size])) == 1 for at in range(0, len(found), size)]
        sums = {"reward": sum(found) / len(found), "zero_groups": sum(equal) / len(equal)}
        batches.append({"tokens": sum(map(len, completion_ids)), "passes": len(found), **sums})
        return found

    rows, tokenizer = Dataset.from_list(spec["rows"]), AutoTokenizer.from_pretrained(spec["model"])
    trainer = GRPOTrainer(spec["model"], reward, config, rows, processing_class=tokenizer, callbacks=[marks])
    marks.timed(trainer, "_generate", "generation")
    marks.timed(trainer, "compute_loss", "passes")
    marks.timed(trainer.accelerator, "backward", "passes")
    trainer.train()
    trainer.save_model(spec["folder"])
    steps = [mark | batch for mark, batch in zip(marks.steps, batches, strict=True)]
    return {"begin_s": marks.begin_s, "steps": steps}


def evaluate(spec: Spec) -> Spec:
    """Computes in bfloat16, in which tailrace saves its models."""
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    encoded = tokenizer.apply_chat_template([row["prompt"] for row in spec["rows"]], **asked)
    with torch.inference_mode():
        found = model.generate(**encoded, max_new_tokens=spec["max_tokens"], do_sample=False)
    texts = tokenizer.batch_decode(found[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    solved = [exact(text, row["answer"]) for text, row in zip(texts, spec["rows"], strict=True)]
    return {"accuracy": sum(solved) / len(solved)}


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    result = {"train": train, "evaluate": evaluate}[sys.argv[1]](spec)
    Path(sys.argv[3]).write_text(json.dumps(result), encoding="utf-8")
