"""Pages of docs/ whose files are written and whose commands run as they are printed.

Only sizes are changed: the model is a tiny random one with a BPE tokenizer, and the run is short.
"""

import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tailrace.cli import main

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    "rounds": "1",
    "group_size": "2",
    "eval_every": "1",
    "checkpoint_every": "1",
    "groups_per_round": "4",
    "groups_per_step": "2",
    "max_completion_tokens": "8",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    fenced = re.findall(
        r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    return [Block(*each) for each in fenced]


def commands(page: str) -> list[str]:
    """The `tailrace` commands of a page, in order, without `tailrace`."""
    shown = "\n".join(block.text for block in blocks(page) if block.language == "console")
    return re.findall(r"^\$ tailrace (.+)$", shown, flags=re.MULTILINE)


def indented(page: str) -> list[str]:
    """The `tailrace` commands of a page that are indented, without `tailrace` and the comment."""
    found = re.findall(r"^    tailrace ([^#\n]+)", (DOCS / page).read_text(), flags=re.MULTILINE)
    return [command.strip() for command in found]


def bpe_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


def save_model(folder: Path, corpus: list[str]) -> None:
    """A random Llama of some 30,000 parameters, with a BPE tokenizer and a chat template."""
    tokenizer = bpe_tokenizer(corpus)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrunk(config: str) -> str:
    for key, value in SMALL.items():
        config, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", config, flags=re.MULTILINE)
        assert count == 1, f"{key} is set {count} times"
    return config


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page beside the model."""
    texts = []
    for block in blocks(page):
        if block.title:
            text = shrunk(block.text) if block.title == "run.toml" else block.text
            (folder / block.title).write_text(text)
            texts.append(text)
    save_model(folder / "models" / "Qwen3-0.6B", texts)


def run(folder: Path, *words: str) -> str:
    """Run Python with some words in a folder, and return what it prints."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_here(folder: Path, command: str) -> None:
    """Run a command in a folder, in this process, whose fork server has imported torch already."""
    with chdir(folder):
        assert main(command.split()) == 0, command
