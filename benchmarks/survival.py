"""Tokens that an update leaves: the share that the new weights draw again with the same noise.

    python benchmarks/survival.py --model examples/quickstart/model|models/SmolLM2-135M-Instruct [--json FILE]

A loop of GRPO on sums, by AdamW without tricks: groups of eight, whose reward is the share of the sum, from
its first digit on, that the response names. After each step the tokens of that step are drawn again with
their own noise under the new weights, each after the same tokens before it. Printed by learning rate and
step: the total variation of the distributions; the share of tokens that are others now, for this draw and for
the inverse of the cumulative distribution in the order of the vocabulary; the share of tokens before the
first other one of their response, which a verification would keep. The JSON file has the same by place and by
entropy of the distribution. results/survival-quickstart.json: --model examples/quickstart/model --groups 4
--steps 4 --max-tokens 24 --rates 1e-5 --rates 1e-4 --rates 1e-3. results/survival-135M.json: --model
models/SmolLM2-135M-Instruct --groups 1 --steps 4 --max-tokens 48.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tailrace
from common import run, write
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.native.sampler import draw, noise_keys, noise_stream
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams

MEMBERS = 8
Row = dict[str, Any]


class Loop:
    """A policy that learns sums, beside an engine with its weights."""

    def __init__(self, path: Path, rate: float, max_tokens: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        limits = SamplingSettings(max_completion_tokens=max_tokens)
        self.engine = NativeEngine(path, NativeEngineSettings(), limits)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.chance, self.version = random.Random(1), 0

    def prompt(self) -> tuple[list[int], str]:
        """A sum, and its value."""
        a, b = self.chance.randrange(10, 99), self.chance.randrange(10, 99)
        if not self.tokenizer.chat_template:
            return self.tokenizer.encode(f"{a} + {b} =\n"), str(a + b)
        chat = [{"role": "user", "content": f"What is {a} + {b}? Explain each step, then say the answer."}]
        ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return list(ids["input_ids"]), str(a + b)

    def sampled(self, groups: int) -> list[tuple[list[int], list[int], int, float]]:
        """Responses: prompt, completion, seed, advantage."""
        found = []
        for number in range(groups):
            prompt, answer = self.prompt()
            seeds = [MEMBERS * (groups * self.version + number) + member for member in range(MEMBERS)]
            for seed in seeds:
                self.engine.submit(GenerationRequest(str(seed), prompt, (), seed))
            ended: dict[str, list[int]] = {}
            while not self.engine.idle:
                ended |= {output.id: output.ids for output in self.engine.step()}
            texts = [self.tokenizer.decode(ended[str(seed)]) for seed in seeds]
            rewards = [named(answer, text) for text in texts]
            advantages = tailrace.group_advantages(rewards, scale="group")
            found += [
                (prompt, ended[str(seed)], seed, advantage)
                for seed, advantage in zip(seeds, advantages, strict=True)
            ]
        return found

    def logits(self, prompt: list[int], ids: list[int]) -> Tensor:
        """[tokens, V], of each token of a completion."""
        logits: Tensor = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return logits

    def step(self, samples: Sequence[tuple[list[int], list[int], int, float]]) -> None:
        """One optimizer step, loaded by the engine."""
        num = sum(len(ids) for _, ids, _, _ in samples)
        for prompt, ids, _, advantage in samples:
            if advantage:
                logprobs = self.logits(prompt, ids).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
                torch.autograd.backward(-advantage * logprobs.sum() / num)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        weights = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        self.engine.load(weights, version=self.version, kv="recompute")


def named(answer: str, text: str) -> float:
    """The share of an answer, from its beginning on, that a text names."""
    return max(num for num in range(len(answer) + 1) if answer[:num] in text) / len(answer)


def drawn(logits: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The tokens of a completion with its noise: by this package, and by the inverse of the cumulative
    distribution, both [tokens]."""
    keys = noise_keys(torch.tensor(noise_stream(seed)), torch.arange(len(logits)))
    uniforms = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    inverse = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    return draw(logits, keys, [SamplingParams(1)] * len(logits)).ids, inverse


def measured(loop: Loop, groups: int) -> tuple[Row, list[Row]]:
    """One step: its figures, and those of each token."""
    samples = loop.sampled(groups)
    with torch.inference_mode():
        before = [loop.logits(prompt, ids) for prompt, ids, _, _ in samples]
    loop.step(samples)
    tokens: list[Row] = []
    num_kept = 0
    for (prompt, ids, seed, _), old in zip(samples, before, strict=True):
        with torch.inference_mode():
            new = loop.logits(prompt, ids)
            variation = (old.softmax(-1) - new.softmax(-1)).abs().sum(-1) / 2
            entropy = -(old.softmax(-1) * old.log_softmax(-1)).sum(-1)
            (own, inverse), (own_new, inverse_new) = drawn(old, seed), drawn(new, seed)
        changed = (own != own_new).tolist()
        num_kept += changed.index(True) if True in changed else len(ids)
        columns = variation.tolist(), entropy.tolist(), changed, (inverse != inverse_new).tolist()
        tokens += [
            {"place": place, "variation": v, "entropy": e, "changed": c, "inverse_changed": i}
            for place, (v, e, c, i) in enumerate(zip(*columns, strict=True))
        ]
    num = len(tokens)
    means = {
        name: sum(row[name] for row in tokens) / num for name in ("variation", "changed", "inverse_changed")
    }
    moved = sum(advantage != 0 for *_, advantage in samples) / len(samples)
    return {**means, "kept": num_kept / num, "tokens": num, "samples_in_loss": moved}, tokens


def by(tokens: list[Row], name: str, edges: Sequence[float]) -> list[Row]:
    """The share of changed tokens between edges of a column."""
    rows = []
    for low, high in zip(edges, [*edges[1:], float("inf")], strict=True):
        part = [row for row in tokens if low <= row[name] < high]
        if part:
            mean = {key: sum(row[key] for row in part) / len(part) for key in ("variation", "changed")}
            rows.append({"from": low, "tokens": len(part), **mean})
    return rows


def main(
    model: Path,
    rates: tuple[float, ...] = (1e-6, 5e-6, 2e-5),
    steps: int = 4,
    groups: int = 2,
    max_tokens: int = 96,
    json: Path | None = None,
) -> None:
    torch.set_num_threads(1)
    results: list[Row] = []
    for rate in rates:
        loop, every = Loop(model, rate, max_tokens), list[Row]()
        rows = []
        for step in range(1, steps + 1):
            row, tokens = measured(loop, groups)
            rows.append({"step": step, **row})
            every += tokens
            print(
                f"rate {rate:g}, step {step}: total variation {row['variation']:.5f}, other tokens "
                f"{row['changed']:.2%} (inverse {row['inverse_changed']:.2%}), kept {row['kept']:.1%} of "
                f"{row['tokens']}",
                flush=True,
            )
        places, entropies = (0, 8, 16, 32, 64), (0.0, 0.1, 0.5, 1.0, 2.0)
        split = {"by_place": by(every, "place", places), "by_entropy": by(every, "entropy", entropies)}
        results.append({"rate": rate, "steps": rows, **split})
    write(json, {"model": model.name, "rates": results})


if __name__ == "__main__":
    run(main)
