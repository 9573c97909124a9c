"""What the benchmarks share: the command line of `main`, results as JSON, peaks of memory, random models."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cyclopts import App

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICKSTART = EXAMPLES / "quickstart" / "quickstart.toml"

QWEN3: dict[str, Any] = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072}
QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
"""The shape of Qwen3-0.6B."""


def run(main: Callable[..., Any]) -> None:
    """Run a script: each parameter of `main` is an option, and the script's docstring is the help."""
    app = App(help=sys.modules[main.__module__].__doc__, help_format="plaintext", version_flags=())
    app.default(main)
    app(result_action="return_value")


def write(path: Path | None, results: object) -> None:
    """Write results as JSON; None: nowhere."""
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


def pss(pid: int) -> int:
    """The proportional set size of a process; 0: it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def peak_pss(command: Sequence[str], env: Mapping[str, str] | None = None, period_s: float = 0.1) -> int:
    """Run a command, or exit with its status if that is not 0. Linux only.

    Returns:
        The largest sum of the proportional set sizes of its processes, looked at each `period_s`.
    """
    process, peak = subprocess.Popen(command, env=env), 0
    while process.poll() is None:
        peak = max(peak, sum(map(pss, tree(process.pid))))
        time.sleep(period_s)
    if process.returncode:
        sys.exit(process.returncode)
    return peak


def save_model(folder: Path, *, kind: str = "qwen3", dtype: str = "float32", **shape: Any) -> int:
    """Save a model with random weights, and a tokenizer of the words w0, w1, ...

    Returns:
        The number of parameters.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **ends, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())
