"""Makes the models of the examples: python examples/quickstart/make_model.py (three minutes on one core)

A Qwen3 of 0.4M parameters learns from demonstrations of reasoning-gym's chain_sum, in two stages:

1. worked: every partial sum is written out, "8 + 4 = 12 - 5 = 7". This it learns to do well.
2. hasty: seven demonstrations in ten now give the bare answer, "7", which a model of this size cannot find at
   once for more than two or three terms; three in ten are still worked.

So it leaves here knowing how to work a sum out and rarely doing so. What reinforcement learning then teaches
it is to take its time: responses grow longer, the longer the chain. Prompts held out for evaluation are
never demonstrated.
"""

import math
import random
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tailrace.data.procedural import is_held_out

FOLDER = Path(__file__).parent
INSTRUCTION = "State the final answer to the following arithmetic problem: "
WORDS = [
    *("<pad>", "<eos>", INSTRUCTION, " =\n", " = ", " = -", "-", *"0123456789"),
    *(f" {sign} {digit}" for sign in "+-" for digit in range(10)),
]
EOS = WORDS.index("<eos>")
TOKENS_A_BATCH = 256
"""Terms times demonstrations: a batch has demonstrations of one length only, and so no padding."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each digit, each signed term, and the fixed phrases."""
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    longest_first = sorted(WORDS[2:], key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model() -> Qwen3ForCausalLM:
    """A Qwen3 with a wide initialisation, which such a small model needs to begin to copy."""
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=WORDS.index("<pad>"),
    )
    return Qwen3ForCausalLM(config)


def worked(expression: str, answer: str) -> str:
    """Every partial sum, the last of which is the answer."""
    first, *rest = expression.split(" ")
    total, text = int(first), first
    for sign, digit in zip(rest[::2], rest[1::2], strict=True):
        total += int(digit) if sign == "+" else -int(digit)
        text += f" {sign} {digit} = {total}"
    assert str(total) == answer
    return text


def demonstrate(
    chance: random.Random, tokenizer: PreTrainedTokenizerFast, hasty: float
) -> tuple[Tensor, Tensor]:
    """A batch of demonstrations of one number of terms.

    Returns:
        ids and labels, [B, T] each; labels are -100 on prompts and after the end.
    """
    num_terms = min(max(2, round(7 * math.exp(1.15 * chance.gauss(0, 1)))), 32)
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) < max(4, TOKENS_A_BATCH // num_terms):
        seed = chance.randrange(2**32)
        config = ChainSumConfig(
            min_terms=num_terms, max_terms=num_terms, min_digits=1, max_digits=1, seed=seed
        )
        entry = ChainSumDataset(config)[0]
        if is_held_out(entry["question"]):
            continue
        bare = chance.random() < hasty
        response = entry["answer"] if bare else worked(entry["metadata"]["expression"], entry["answer"])
        rows.append((tokenizer.encode(entry["question"] + "\n"), [*tokenizer.encode(response), EOS]))
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def imitate(
    model: Qwen3ForCausalLM, batch: Callable[[], tuple[Tensor, Tensor]], steps: int, rate: float
) -> None:
    """Supervised learning on the responses: warm-up, a constant half, and a linear way down."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 50, 1.0, max(0.05, 2 * (1 - step / steps)))
        ids, labels = batch()
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        answered = labels[:, 1:] != -100
        loss = cross_entropy(model.lm_head(hidden[answered]), labels[:, 1:][answered])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chance, tokenizer, model = random.Random(0), make_tokenizer(), make_model()
    for name, hasty, steps, rate in (("worked", 0.0, 1500, 3e-3), ("model", 0.7, 100, 5e-4)):
        imitate(model, partial(demonstrate, chance, tokenizer, hasty), steps, rate)
        deepcopy(model).to(torch.bfloat16).save_pretrained(FOLDER / name)
        tokenizer.save_pretrained(FOLDER / name)


if __name__ == "__main__":
    main()
