"""Makes the model of examples/tools.toml: python examples/tools/make_model.py (three minutes on one core)

A Qwen3 of 0.2M parameters learns from demonstrations of reasoning-gym's products, in the format of Hermes:

1. The demonstrated episodes have two turns: the first calls the calculator, the second repeats its answer.
   The model learns to copy. It is too small to multiply.
2. Nineteen demonstrations in twenty now answer at once, with a number that is a guess.

So the model leaves here knowing how to use the tool and nearly never doing so. Held-out prompts are never
demonstrated.
"""

import random
import re
from pathlib import Path

import torch
from calculator import calculator
from reasoning_gym.arithmetic.products import ProductsConfig, ProductsDataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tailrace.drivers.data.procedural import is_held_out
from tailrace.drivers.environments.history import Chat
from tailrace.drivers.environments.tools import schemas_of

FOLDER = Path(__file__).parent / "model"
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
BEFORE_EXPRESSION, AFTER_EXPRESSION = '", "arguments": {"expression": "', '"}}\n</tool_call>'
WORDS = [
    *SPECIAL,
    *("system\n", "user\n", "assistant\n", "\n", "Tools: ", "calculator", "error: "),
    *("Solve the following multiplication: ", ". Give only the result as your final answer."),
    *('<tool_call>\n{"name": "', BEFORE_EXPRESSION, AFTER_EXPRESSION),
    *("<tool_response>\n", "\n</tool_response>", " * ", *"0123456789"),
]
END = WORDS.index("<|im_end|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen's, in short."""

Row = list[tuple[list[int], bool]]
"""An episode: token ids, and whether the model generates them."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each digit and for each fixed phrase."""
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    longest_first = sorted(WORDS[len(SPECIAL) :], key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def make_model() -> Qwen3ForCausalLM:
    """A Qwen3 with a wide initialisation, which such a small model needs to begin to copy."""
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=WORDS.index("<pad>"),
    )
    return Qwen3ForCausalLM(config)


def ask(chance: random.Random) -> tuple[str, str]:
    """A prompt that is not held out, and its product."""
    while True:
        config = ProductsConfig(min_digits=2, max_digits=3, seed=chance.randrange(2**32), size=1)
        question = ProductsDataset(config)[0]["question"]
        if not is_held_out(question):
            found = re.search(r"\d+ \* \d+", question)
            assert found
            return question, found.group()


class Demonstrations:
    """Episodes, token by token as a run has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> None:
        self._tokenizer, self._chance = tokenizer, chance
        self._chat = Chat(tokenizer, "tools", {}, "tool")
        self._tools = schemas_of({"calculator": calculator})

    def batch(self, num: int, guesses: float) -> tuple[Tensor, Tensor]:
        """Ids and labels, [num, T] each. Labels are -100 where the model does not generate.

        Args:
            guesses: share of episodes that answer at once.
        """
        rows = [self._row(self._chance.random() < guesses) for _ in range(num)]
        longest = max(sum(len(ids) for ids, _ in row) for row in rows)
        ids, labels = torch.zeros(num, longest, dtype=torch.long), torch.full((num, longest), -100)
        for place, row in enumerate(rows):
            start = 0
            for part, generated in row:
                ids[place, start : start + len(part)] = torch.tensor(part)
                if generated:
                    labels[place, start : start + len(part)] = torch.tensor(part)
                start += len(part)
        return ids, labels

    def _row(self, guesses: bool) -> Row:
        question, expression = ask(self._chance)
        messages = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(
            messages, tools=self._tools, add_generation_prompt=True, tokenize=False
        )
        prompt, answer = (self._encode(text), False), calculator(expression)
        if guesses:
            guess = str(self._chance.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
            return [prompt, (self._turn(guess), True)]
        call = f'<tool_call>\n{{"name": "calculator{BEFORE_EXPRESSION}{expression}{AFTER_EXPRESSION}'
        observation = self._chat.observe([{"role": "tool", "content": answer}], END)
        return [prompt, (self._turn(call), True), (observation, False), (self._turn(answer), True)]

    def _turn(self, text: str) -> list[int]:
        return [*self._encode(text), END]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def imitate(
    model: Qwen3ForCausalLM, demonstrations: Demonstrations, guesses: float, steps: int, rate: float
) -> None:
    """Supervised learning on the turns of the model: warm-up, a constant half, and a linear way down."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 50, 1.0, max(0.05, 2 * (1 - step / steps)))
        ids, labels = demonstrations.batch(32, guesses)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, model = make_tokenizer(), make_model()
    demonstrations = Demonstrations(tokenizer, random.Random(0))
    imitate(model, demonstrations, guesses=0.0, steps=1200, rate=3e-3)
    imitate(model, demonstrations, guesses=0.95, steps=200, rate=5e-4)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
