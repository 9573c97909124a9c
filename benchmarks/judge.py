"""A judge whose layers stream in from host memory, against the same judge resident on the device.

    python benchmarks/judge.py [--json FILE] [--layers 14] [--tokens 256] [--texts 2] [--repeats 5]
                               [--device cpu] [--dtype float32] [--threads 1]

A language model of random weights scores the same texts in one batch, in three processes that take turns:

    resident   all layers are on the device
    half       half of the layers are; the others are copied as the forward pass reaches them
    streamed   none is, but for the one that computes and the one that arrives

    peak_bytes     on a CPU the growth of the process's resident memory (VmHWM) since its imports, on a CUDA
                   device torch's max_memory_allocated
    budget_bytes   `reward.judges.memory_mib` in bytes; null: without limit
    seconds        median over the repetitions, the first one left out
    saved_bytes    peak of resident, less that of streamed
    time_ratio     seconds of streamed by those of resident

The scores must be equal. On a CPU the layers are read from the model's files, which the kernel caches, and
the reading does not overlap with the computation.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tailrace.memory import ModelShape
from tailrace.reward.judge_memory import IN_TRANSIT, MIB, LayerBudget
from tailrace.reward.judge_model import ModelJudge
from tailrace.reward.judge_settings import LocalJudgeSettings

VOCABULARY = 8192
WORDS = [f"w{number}" for number in range(VOCABULARY)]


def make_model(folder: Path, num_layers: int) -> None:
    """Save a language model of about seven million random parameters a layer, with a tokenizer of words."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)


def judge_process(parent: Connection, settings: LocalJudgeSettings, texts: Sequence[str]) -> None:
    """Load the judge; score the texts as often as the parent asks; say the peak of the memory."""
    torch.set_num_threads(settings.threads)
    is_cpu = settings.device == "cpu"
    before = status_bytes("VmRSS") if is_cpu else 0
    judge = ModelJudge.load(settings)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    parent.send("loaded")
    while parent.recv() == "score":
        begun = time.perf_counter()
        scores = judge.scores(conversations)
        parent.send((time.perf_counter() - begun, scores))
    parent.send(status_bytes("VmHWM") - before if is_cpu else torch.cuda.max_memory_allocated())


def status_bytes(name: str) -> int:
    """A size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(
    settings: dict[str, LocalJudgeSettings], texts: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Let the judges score in turn."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, each in settings.items():
        pipes[name], child = context.Pipe()
        processes.append(context.Process(target=judge_process, args=(child, each, texts)))
        processes[-1].start()
        child.close()
        pipes[name].recv()
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    scores = {}
    for _ in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.send("score")
            taken, scores[name] = pipe.recv()
            seconds[name].append(taken)
    rows = {}
    for name, pipe in pipes.items():
        torch.testing.assert_close(torch.tensor(scores[name]), torch.tensor(scores["resident"]))
        pipe.send("end")
        budget = settings[name].memory_mib
        rows[name] = {
            "peak_bytes": pipe.recv(),
            "budget_bytes": budget and budget * MIB,
            "seconds": statistics.median(seconds[name][1:]),
        }
    for process in processes:
        process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--texts", type=int, default=2, help="of the batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    num_tokens = arguments.tokens * arguments.texts
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (arguments.texts, arguments.tokens), generator=generator)
    texts = [" ".join(WORDS[id] for id in row) for row in ids.tolist()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, arguments.layers)
        whole = LocalJudgeSettings.model_validate(
            {
                "kind": "local",
                "path": folder,
                "template": "{completion}",
                "labels": ("w1", "w2"),
                "device": arguments.device,
                "dtype": arguments.dtype,
                "threads": arguments.threads,
                "max_tokens": num_tokens,
            }
        )
        shape = ModelShape.read(folder)
        budget = LayerBudget.of(shape, whole)
        least = budget.least_bytes(num_tokens)
        half = least + budget.layer_bytes * (budget.num_layers - IN_TRANSIT) // 2
        settings = {
            "resident": whole,
            "half": whole.model_copy(update={"memory_mib": -(-half // MIB)}),
            "streamed": whole.model_copy(update={"memory_mib": -(-least // MIB)}),
        }
        rows = measure(settings, texts, arguments.repeats)
    for name, row in rows.items():
        budget_words = f" of {row['budget_bytes'] / MIB:.0f} MiB" if row["budget_bytes"] else ""
        print(
            f"{name:9} peak {row['peak_bytes'] / MIB:.0f} MiB{budget_words}, {row['seconds']:.3f} s for "
            f"{arguments.texts} texts of {arguments.tokens} tokens; {shape.num_parameters / 1e6:.0f}M "
            f"parameters, {arguments.dtype}, {arguments.device}, {arguments.threads} threads"
        )
    resident, streamed = rows["resident"], rows["streamed"]
    found = {
        "parameters": shape.num_parameters,
        **{name: getattr(arguments, name) for name in ("device", "dtype", "threads", "tokens", "texts")},
        "saved_bytes": resident["peak_bytes"] - streamed["peak_bytes"],
        "time_ratio": streamed["seconds"] / resident["seconds"],
        "modes": rows,
    }
    print(f"saved {found['saved_bytes'] / MIB:.0f} MiB, time ratio {found['time_ratio']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
