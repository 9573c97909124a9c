"""Makes the models of the examples: python examples/quickstart/make_model.py (eight minutes on one core)

A Qwen3 of 0.4M parameters learns from demonstrations of reasoning-gym's chain_sum:

1. worked: every partial sum is written out, "8 + 4 = 12 - 5 = 7". This it learns to do well.
2. model, made from worked: seven demonstrations in ten now give the bare answer, "7", which a model of this
   size cannot find at once for more than two or three terms; three in ten are still worked.
3. rambling, made like worked and then on: six in ten of its responses are a guess, which is nearly always
   wrong; in the others the sum is worked out. Sums of ten terms are always worked out, and then one response
   in four states its answer again and again, for 400 tokens on average.

So the second and the third leave here knowing how to work a sum out and often not doing so. What
reinforcement learning then teaches them is to take their time: responses grow longer, the longer the chain.
The third is for races between schedules: its long tail comes from long prompts, and earns neither more nor
less reward, so that it stays while all else is learned. Held-out prompts are never demonstrated.
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
from torch.nn.functional import cross_entropy, one_hot
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tailrace.config import load_config
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.data.procedural import Task, is_held_out
from tailrace.drivers.data.settings import ProceduralSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings

FOLDER = Path(__file__).parent
INSTRUCTION = "State the final answer to the following arithmetic problem: "
WORDS = [
    *("<pad>", "<eos>", INSTRUCTION, " =\n", " = ", " = -", "-", *"0123456789"),
    *(f" {sign} {digit}" for sign in "+-" for digit in range(10)),
]
EOS = WORDS.index("<eos>")
AGAIN = WORDS.index(" =\n")
"""Before each restatement of the answer."""
TOKENS_A_BATCH = 256
"""Terms times demonstrations: a batch has demonstrations of one length only, and so no padding."""
LONG_SUM = 10
"""Terms that make the third model ramble."""
RAMBLE = 0.25
"""The share of its responses to such sums that go on after the answer."""
RAMBLED_TOKENS = 400
"""What those go on for, on average, if nothing cuts them off."""
ROOM = 1500
"""Tokens of the longest response that is demonstrated or checked."""

Demonstrations = tuple[Tensor, Tensor, Tensor]
"""Tokens [B, T]; whether the next token is demonstrated [B, T - 1]; those N next tokens: [N], or their
probabilities [N, V]."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each digit, each signed term, and the fixed phrases."""
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    longest_first = sorted(WORDS[2:], key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model(*, num_kv_heads: int = 4, max_tokens: int = 1024) -> Qwen3ForCausalLM:
    """A Qwen3 with a wide initialisation, which such a small model needs to begin to copy."""
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=24,
        max_position_embeddings=max_tokens,
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


def ask(chance: random.Random, num_terms: int) -> tuple[str, str, str]:
    """A prompt that is not held out, its sum, and the answer."""
    while True:
        seed = chance.randrange(2**32)
        config = ChainSumConfig(
            min_terms=num_terms, max_terms=num_terms, min_digits=1, max_digits=1, seed=seed
        )
        entry = ChainSumDataset(config)[0]
        if not is_held_out(entry["question"]):
            return entry["question"] + "\n", entry["metadata"]["expression"], entry["answer"]


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Ids and labels, [B, T] each, of prompts and responses. Labels are -100 on prompts and after the end."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def demonstrate(chance: random.Random, tokenizer: PreTrainedTokenizerFast, hasty: float) -> Demonstrations:
    """Sums of one number of terms; the share `hasty` of them is not worked out."""
    num_terms = min(max(2, round(7 * math.exp(1.15 * chance.gauss(0, 1)))), 32)
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) < max(4, TOKENS_A_BATCH // num_terms):
        prompt, expression, answer = ask(chance, num_terms)
        response = answer if chance.random() < hasty else worked(expression, answer)
        rows.append((tokenizer.encode(prompt), [*tokenizer.encode(response), EOS]))
    ids, labels = collate(rows)
    answered = labels[:, 1:] != -100
    return ids, answered, labels[:, 1:][answered]


def demonstrate_rambling(
    chance: random.Random, tokenizer: PreTrainedTokenizerFast, hasty: float
) -> Demonstrations:
    """Sums of one number of terms, LONG_SUM or fewer. Of those with fewer, the share `hasty` is answered with
    some other sum's answer; in every other batch of those with LONG_SUM, the answers are restated up to some
    length.

    How often is of no matter to what is learned: the target after each answer is not what follows here but
    the probabilities of going on and of ending, which make the number of restatements geometric.
    """
    is_long = chance.random() < 0.5
    num_terms = LONG_SUM if is_long else chance.randrange(2, LONG_SUM)
    room = chance.choice((0, round(50 * (ROOM / 50) ** chance.random()))) if is_long else 0
    rows: list[tuple[list[int], list[int]]] = []
    going_on: list[float] = []
    while len(rows) < max(1, 6 * TOKENS_A_BATCH // max(room, 6 * num_terms)):
        prompt, expression, answer = ask(chance, num_terms)
        check = tokenizer.encode(answer)
        guesses = not is_long and chance.random() < hasty
        chain = tokenizer.encode(ask(chance, num_terms)[2] if guesses else worked(expression, answer))
        response = [*chain, *(room // len(check) * [AGAIN, *check])][: max(len(chain), room)]
        rows.append((tokenizer.encode(prompt), [*response, EOS] if not room else response))
        going_on.append(1 - (len(check) + 1) / RAMBLED_TOKENS)
    ids, labels = collate(rows)
    labels = labels[:, 1:]
    ends = (labels == EOS) | (labels == AGAIN)
    again = torch.tensor(going_on)[:, None].where(ends.cumsum(1) > 1, RAMBLE if is_long else 0.0)
    targets = one_hot(labels.clamp(min=0), len(WORDS)).float()
    targets[ends] = 0.0
    targets[..., AGAIN] += again * ends
    targets[..., EOS] += (1 - again) * ends
    answered = labels != -100
    return ids, answered, targets[answered]


def imitate(model: Qwen3ForCausalLM, batch: Callable[[], Demonstrations], steps: int, rate: float) -> None:
    """Supervised learning on the responses: warm-up, a constant half, and a linear way down."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 50, 1.0, max(0.05, 2 * (1 - step / steps)))
        ids, answered, targets = batch()
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        loss = cross_entropy(model.lm_head(hidden[answered]), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    deepcopy(model).to(torch.bfloat16).save_pretrained(FOLDER / name)
    tokenizer.save_pretrained(FOLDER / name)


def make_worked_and_hasty() -> None:
    torch.manual_seed(0)
    chance, tokenizer, model = random.Random(0), make_tokenizer(), make_model()
    for name, hasty, steps, rate in (("worked", 0.0, 1500, 3e-3), ("model", 0.7, 100, 5e-4)):
        imitate(model, partial(demonstrate, chance, tokenizer, hasty), steps, rate)
        save(model, tokenizer, name)


def make_rambling() -> None:
    """One key-value head for its four query heads: a cache as small as today's models have it."""
    torch.manual_seed(0)
    chance, tokenizer, model = random.Random(0), make_tokenizer(), make_model(num_kv_heads=1, max_tokens=2048)
    imitate(model, partial(demonstrate, chance, tokenizer, 0.0), 1500, 3e-3)
    imitate(model, partial(demonstrate_rambling, chance, tokenizer, 0.6), 800, 2e-3)
    save(model, tokenizer, "rambling")


def check(name: str, batches: int = 24, batch: int = 64) -> None:
    """Print how long responses to held-out prompts of the race are, and how many are right."""
    settings = load_config(FOLDER.parents[1] / "benchmarks" / "race" / "race.toml").data
    assert isinstance(settings, ProceduralSettings)
    task, tokenizer = Task(settings), load_tokenizer(FOLDER / name)
    prompts = open_prompts(settings, tokenizer, seed=0, split="eval")
    engine = NativeEngine.from_pretrained(
        FOLDER / name, NativeEngineSettings(), SamplingSettings(max_completion_tokens=ROOM)
    )
    for number in range(batches * batch):
        engine.submit(GenerationRequest(str(number), prompts[number].ids, (), number))
    responses: dict[int, list[int]] = {}
    while not engine.idle:
        responses |= {int(output.id): output.ids for output in engine.step()}
    right = [
        task.score(tokenizer.decode(ids, skip_special_tokens=True), prompts[n].row) == 1.0
        for n, ids in responses.items()
    ]
    lengths = [len(responses[number]) for number in range(batches * batch)]
    rambling = [len(ids) for ids in responses.values() if AGAIN in ids]
    each = [sorted(lengths[start : start + batch]) for start in range(0, len(lengths), batch)]
    ratios = sorted(one[-1] / one[batch // 2] for one in each)
    lengths.sort()
    print(
        f"{name}: {len(lengths)} responses, {sum(right) / len(right):.3f} of them right; "
        f"tokens: median {lengths[len(lengths) // 2]}, mean {sum(lengths) / len(lengths):.1f}, "
        f"p99 {lengths[len(lengths) * 99 // 100]}, max {lengths[-1]}\n"
        f"{len(rambling) / len(lengths):.4f} of them ramble, for {sum(rambling) / max(1, len(rambling)):.0f} "
        f"tokens on average; max / median of {batch}: from {ratios[0]:.0f} to {ratios[-1]:.0f}, "
        f"half above {ratios[len(ratios) // 2]:.0f}"
    )


def main() -> None:
    torch.set_num_threads(1)
    make_worked_and_hasty()
    make_rambling()
    check("rambling")


if __name__ == "__main__":
    main()
