"""What the benchmarks share: a command line from the parameters of `main`, results as JSON, random models."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import App

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICKSTART = EXAMPLES / "quickstart" / "quickstart.toml"


def run(main: Callable[..., Any]) -> None:
    """Run a script: each parameter of `main` is an option, and the script's docstring is the help."""
    app = App(help=sys.modules[main.__module__].__doc__, help_format="plaintext", version_flags=())
    app.default(main)
    app(result_action="return_value")


def write(path: Path | None, results: object) -> None:
    """Write results as JSON; None: nowhere."""
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n")


def save_model(folder: Path, *, dtype: str = "float32", **shape: int) -> int:
    """Save a Qwen3 with random weights, and a tokenizer of the words w0, w1, ...

    Returns:
        The number of parameters.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = Qwen3Config(tie_word_embeddings=True, **ends, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())
