"""One engine, driven by engine.py: reads a number, generates so many requests, prints its seconds; again.

    python engine_peers.py ENGINE MODEL_FOLDER REQUESTS_JSON CORE DTYPE

Runs under the interpreter of the engine it drives, so it imports nothing of another. Every engine samples
at temperature 1 and returns the log-prob of each token; none may stop early. Prints, for each round,
`ROUND wall_seconds cpu_seconds`; the CPU seconds of a server are those of its client.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Requests = list[tuple[list[int], int]]
"""(prompt, tokens to generate)"""
MAX_REQUESTS = 256
KV_TOKENS = 65_536
"""The requests have fewer."""
Generate = Callable[[Requests], int]
"""Serves requests that arrive together; returns the number of tokens."""


def native(model: str, dtype: str = "float32", *, graphs: bool = True, **settings: object) -> Generate:
    import torch

    from tailrace.contracts.engine import GenerationRequest
    from tailrace.contracts.sampling import SamplingSettings
    from tailrace.drivers.engine.native.engine import NativeEngine
    from tailrace.drivers.engine.settings import NativeEngineSettings
    from tailrace.types import SamplingParams

    torch.set_num_threads(1)
    given = {"dtype": dtype, "max_num_seqs": MAX_REQUESTS, "kv_cache_tokens": KV_TOKENS, **settings}
    of_engine, limits = (
        NativeEngineSettings.model_validate(given),
        SamplingSettings(max_completion_tokens=1536),
    )
    engine = NativeEngine(Path(model), of_engine, limits)
    if not graphs:
        engine._graphs = None

    def generate(requests: Requests) -> int:
        for index, (prompt, length) in enumerate(requests):
            sampling = SamplingParams(max_completion_tokens=length, ignore_end_of_text=True)
            engine.submit(GenerationRequest(str(index), prompt, (), index, sampling=sampling))
        num_tokens = 0
        while not engine.idle:
            num_tokens += sum(len(output.ids) for output in engine.step())
        return num_tokens

    return generate


def vllm(model: str, dtype: str, *, eager: bool) -> Generate:
    import vllm

    engine = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=eager,
        max_num_seqs=MAX_REQUESTS,
        max_model_len=2048,
        disable_log_stats=True,
    )

    def generate(requests: Requests) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        sampling = [
            vllm.SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for _, length in requests
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def served(command: list[str], model: str, core: str) -> Generate:
    """A server on one core, asked over vLLM's route for token ids by a client on the other cores."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["taskset", "-c", core, *command, "--port", str(port), "--max-num-seqs", str(MAX_REQUESTS)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if others := set(range(os.cpu_count() or 1)) - {int(core)}:
        os.sched_setaffinity(0, others)
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(0.5)

    async def one(client: httpx.AsyncClient, prompt: list[int], length: int) -> int:
        # No seed: one for each request ends vLLM on a CPU when a prefill is chunked.
        sampling = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "logprobs": 1}
        body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
        reply = (await client.post(f"{url}/inference/v1/generate", json=body)).raise_for_status().json()
        return len(reply["choices"][0]["token_ids"])

    async def all_of(requests: Requests) -> int:
        limits = httpx.Limits(max_connections=MAX_REQUESTS)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return sum(await asyncio.gather(*(one(client, *request) for request in requests)))

    return lambda requests: asyncio.run(all_of(requests))


def native_http(model: str, core: str, dtype: str) -> Generate:
    command = [sys.executable, "-m", "tailrace.cli", "serve", model, "--dtype", dtype]
    command += ["--kv-cache-tokens", str(KV_TOKENS)]
    return served(command, model, core)


def vllm_http(model: str, core: str, dtype: str) -> Generate:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as its server is deployed
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--dtype", dtype, "--max-model-len", "2048"]
    command += ["--enable-scale-out", "--skip-tokenizer-init"]
    return served(command, model, core)


ENGINES: dict[str, Callable[[str, str, str], Generate]] = {
    "native": lambda model, core, dtype: native(model, dtype),
    "vllm_eager": lambda model, core, dtype: vllm(model, dtype, eager=True),
    "vllm_compiled": lambda model, core, dtype: vllm(model, dtype, eager=False),
    "native_http": native_http,
    "vllm_http": vllm_http,
}


def main(engine: str, model: str, file: str, core: str, dtype: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    # In this process, so that its scheduler has the same one core as everybody's.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": core}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "CUDA_VISIBLE_DEVICES": ""}
    requests: Requests = json.loads(Path(file).read_text(encoding="utf-8"))
    generate = ENGINES[engine](model, core, dtype)
    for line in sys.stdin:
        asked = requests[: int(line)]
        wall, cpu = time.perf_counter(), time.process_time()
        num_tokens = generate(asked)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert num_tokens == sum(length for _, length in asked), num_tokens
        print(f"\nROUND {wall} {cpu}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
