"""What an in-flight weight update costs, by transport: time to publish, pause of the engine, lost tokens.

    python benchmarks/weights.py [--size 0.45M|25M] [--repeats N] [--vllm-python PATH] [--json FILE]
    python benchmarks/weights.py --faults [--vllm-python PATH]
    python benchmarks/weights.py --probes 200 [--model FOLDER] [--dtype bfloat16|float32]

A trainer publishes its weights. Then one embedded engine, and one vLLM server if its interpreter is given,
serves 32 sequences, and when all are under way it loads the weights with the KV cache kept. There is a
trainer process for each transport, all beside one engine, and the transports take turns. Random weights of a
Qwen3 shape, float32, one thread for each process, on one host. The rows of vLLM are named vllm_TRANSPORT.

    publish_s    from asking the trainer to publish to its answer: a file, a folder, or a copy in its memory
    pause_s      the longest time without a token, from asking the engine to load to its first token of the
                 new version, less a median decode step: what is not in files is sent in it
    tokens_lost  tokens that the embedded engine counted and no sample has, and tokens that a sample lacks
    bytes        size of the published tensors

The file has the figures of the last size for each transport, and those of every size under "sizes".

--faults plants faults in the way of weights, as the tests do, and prints the cause that the first probe after
each names. --probes trains a step for each of so many publications and counts those that the probe calls not
arrived; it compares the time of a probe with that of a decode step of 64 sequences.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

from cyclopts import Parameter

from common import run, save_model, write
from engine import SIZES, VOCABULARY, Size
from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import config_of
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import DTYPE
from tailrace.devices import DeviceMap
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.base import Opening
from tailrace.drivers.weights.settings import FilesystemSettings, ProcessGroupSettings, SharedMemorySettings
from tailrace.drivers.workers.engine import EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.kinds import HttpEngines, VllmServers
from tailrace.types import Group, Prompt, Sample, SampleId

TESTS = Path(__file__).parents[1] / "tests"
sys.path += str(TESTS), str(TESTS / "extras" / "http" / "vllm")
NUM_SEQUENCES, NUM_TOKENS, MAX_CONTEXT = 32, 192, 512
NUM_DECODED, DECODED_TOKENS = 64, 12
"""Sequences and tokens of the decode steps that a probe is compared with."""
SAMPLING = SamplingSettings(max_completion_tokens=NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one update, or the medians of several."""

    publish_s: float
    pause_s: float
    tokens_lost: int
    bytes: int


class TimedCounter(TokenCounter):
    """Keeps the times at which tokens arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[float] = []

    def add(self, num_tokens: int) -> None:
        self.arrivals.append(time.perf_counter())
        super().add(num_tokens)


Pair = tuple[RemoteEngine | HttpEngine, RemoteTrainer]
"""An engine, and a trainer that publishes by one transport."""


@asynccontextmanager
async def opened(model: Path, folder: Path, vllm_python: str | None) -> AsyncIterator[dict[str, Pair]]:
    """An engine of each kind, and a trainer for each transport."""
    logs = folder / "logs"
    engine_job = EngineJob(model=model, engine=NativeEngineSettings(), sampling=SAMPLING, report_every_s=0.0)
    async with AsyncExitStack() as stack:
        worker = await LocalSpawner(logs).start("engine-0", EngineWorker, engine_job)
        native = RemoteEngine(worker, engine_job)
        stack.push_async_callback(native.close)
        trainers = {}
        files = FilesystemSettings(folder=folder / "weights")
        for settings in (SharedMemorySettings(), files, ProcessGroupSettings()):
            name = settings.transport
            job = TrainerJob(
                model=model,
                trainer=TrainerSettings(),
                algorithm=AlgorithmSettings(),
                sampling=SAMPLING,
                weights=settings,
                published_dtype="float32",
            )
            trainers[name] = RemoteTrainer(
                [await LocalSpawner(logs).start(f"trainer-{name}", TrainerWorker, job)], job
            )
            stack.push_async_callback(trainers[name].close)
        await asyncio.gather(native.ready(), *(trainer.ready() for trainer in trainers.values()))
        pairs: dict[str, Pair] = {name: (native, trainer) for name, trainer in trainers.items()}
        urls: tuple[str, ...] = ()
        for name, trainer in trainers.items() if vllm_python else ():
            tree = {
                "run": {"rounds": 1, "group_size": NUM_SEQUENCES},
                "schedule": {"name": "serial"},
                "model": {"path": str(model)},
                "data": {"kind": "rows", "path": "none.jsonl", "max_prompt_tokens": MAX_CONTEXT - NUM_TOKENS},
                "sampling": {"max_completion_tokens": NUM_TOKENS},
                "engine": {"kind": "vllm", "python": vllm_python, "urls": urls, "args": ["--enforce-eager"]},
            }
            tree["engine"] |= {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
            no_devices, spawner = DeviceMap((None,), (None,)), LocalSpawner(logs)
            opening = Opening(config_of(tree), folder, None, load_tokenizer(model), spawner, no_devices)
            engine = await HttpEngines(VllmServers(), opening, trainer).begin(f"vllm-{name}", 0)
            stack.push_async_callback(engine.close)
            await engine.ready()
            urls = (str(engine.connection.client.base_url),)  # the others join the first one's server
            pairs[f"vllm_{name}"] = engine, trainer
        yield pairs


def fresh_samples() -> list[Sample]:
    group = Group(Prompt(0, [n % VOCABULARY for n in range(32)]), NUM_SEQUENCES, [])
    return [Sample(SampleId(0, 0, number), group, seed=number) for number in range(NUM_SEQUENCES)]


async def update(pair: Pair, version: int) -> Figures:
    """Publish, load while all sequences are under way, and let them end."""
    engine, trainer = pair
    engine.counter = counter = TimedCounter()
    if isinstance(engine, RemoteEngine):
        engine.send = trainer.send
    start_s = time.perf_counter()
    weights = await trainer.publish(version)
    publish_s = time.perf_counter() - start_s
    counted, samples = engine.usage().num_counted or 0, fresh_samples()
    generation = asyncio.gather(*(engine.generate(sample) for sample in samples))
    while min(sample.num_tokens for sample in samples) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    load_s = time.perf_counter()
    await engine.load(weights, kv="keep")
    await generation
    too_early = [sample.spans for sample in samples if sample.spans[-1].version != version]
    assert not too_early, f"{too_early} ended before version {version} came"
    gaps = [(after - before, after) for before, after in pairwise(counter.arrivals)]
    longest = max(gap for gap, end_s in gaps if end_s > load_s)
    num_tokens = sum(sample.num_tokens for sample in samples)
    own_count = engine.usage().num_counted
    lost = 0 if own_count is None else own_count - counted - num_tokens
    return Figures(
        publish_s=publish_s,
        pause_s=max(0.0, longest - median(gap for gap, _ in gaps)),
        tokens_lost=abs(lost) + NUM_SEQUENCES * NUM_TOKENS - num_tokens,
        bytes=weights.num_bytes,
    )


async def measure(model: Path, folder: Path, repeats: int, vllm_python: str | None) -> dict[str, Figures]:
    """The medians of each transport. The first update of each is not counted: it connects."""
    figures: dict[str, list[Figures]] = {}
    versions = count(1)  # the engines of one vLLM server share its versions
    async with opened(model, folder, vllm_python) as pairs:
        for _ in range(repeats + 1):
            for name, pair in pairs.items():
                figures.setdefault(name, []).append(await update(pair, next(versions)))
    return {
        name: Figures(
            publish_s=median(each.publish_s for each in updates[1:]),
            pause_s=median(each.pause_s for each in updates[1:]),
            tokens_lost=sum(each.tokens_lost for each in updates),
            bytes=updates[0].bytes,
        )
        for name, updates in figures.items()
    }


async def print_faults(folder: Path, vllm_python: str | None) -> dict[str, str]:
    """The cause that the first probe after each fault names. Sound publications around it must arrive."""
    from planted_cases import causes

    from helpers.faults import ADAPTER_FAULTS, FAULTS, arrivals
    from helpers.tiny_models import save_tiny_model

    save_tiny_model(folder / "model")
    found = {}
    for fault in (*FAULTS, *ADAPTER_FAULTS):
        first, second, spoiled, after = await arrivals(folder / "model", folder / fault, fault)
        assert (first.cause, second.cause, after.cause) == ("", "", "")
        found[f"embedded engine: {fault}"] = spoiled.cause
    if vllm_python:
        (folder / "vllm").mkdir()
        for fault, (spoiled, after) in (await causes(folder / "vllm")).items():
            assert after == ""
            found[f"vLLM: {fault or 'none'}"] = spoiled
    for fault, cause in found.items():
        print(f"  {fault:48} {cause or 'arrived'}")
    return found


async def measure_probes(model: Path, folder: Path, num: int, dtype: DTYPE) -> dict[str, float]:
    """False alarms in a number of publications, and seconds by median."""
    from helpers.faults import publications

    sampling = SamplingSettings(max_completion_tokens=DECODED_TOKENS)
    settings = NativeEngineSettings(threads=1, dtype=dtype, max_num_seqs=NUM_DECODED)
    job = EngineJob(model=model, engine=settings, sampling=sampling, report_every_s=0.0)
    async with AsyncExitStack() as stack:
        published = await stack.enter_async_context(
            publications(model, folder, learning_rate=1e-5, dtype=dtype, num_samples=1)
        )
        engine = RemoteEngine(await LocalSpawner(folder / "logs").start("engine", EngineWorker, job), job)
        stack.push_async_callback(engine.close)
        await engine.ready()
        group = Group(Prompt(0, [n % published.vocabulary for n in range(32)]), NUM_DECODED, [])
        samples = [Sample(SampleId(0, 0, number), group, seed=number) for number in range(NUM_DECODED)]
        await asyncio.gather(*(engine.generate(sample) for sample in samples))
        decoded, found = engine.usage().decoded, []

        for _ in range(num):
            await engine.load(await published.next(), kv="recompute")
            assert engine.arrival is not None
            found.append(engine.arrival)
        for cause in filter(None, (each.cause for each in found)):
            print(f"  false alarm: {cause}")
        return {
            "publications": num,
            "false_alarms": sum(bool(each.cause) for each in found),
            "largest_difference": max(each.difference for each in found),
            "limit": found[0].limit,
            "probe_s": median(each.seconds for each in found),
            "sequences": decoded.running / decoded.steps,
            "decode_step_s": decoded.seconds / decoded.steps,
        }


def main(
    size: Size | None = None,
    repeats: int = 3,
    vllm_python: Annotated[str | None, Parameter(env_var="VLLM_PYTHON")] = None,
    json: Path | None = None,
    faults: bool = False,
    probes: int = 0,
    model: Path = Path("models/SmolLM2-135M-Instruct"),
    dtype: DTYPE | None = None,
) -> None:
    if faults:
        with tempfile.TemporaryDirectory() as name:
            write(json, clock.run(print_faults(Path(name), vllm_python), virtual=False))
        return
    if probes:
        found = {}
        for each_dtype in [dtype] if dtype else ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as name:
                measured = measure_probes(model, Path(name), probes, each_dtype)
                found[each_dtype] = clock.run(measured, virtual=False)
            figures = "; ".join(f"{key} {value:.4g}" for key, value in found[each_dtype].items())
            print(f"{model.name}, {each_dtype} engine, float32 trainer, cpu, 1 thread a process: {figures}")
        write(json, found)
        return
    sizes: dict[str, dict[str, Figures]] = {}
    for each in [size] if size else SIZES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            num_parameters = save_model(folder / "model", **SIZES[each])
            where = f"{num_parameters / 1e6:.2f}M parameters, cpu, 1 thread a process"
            print(f"{each}: {NUM_SEQUENCES} sequences under way; {where}")
            sizes[each] = clock.run(measure(folder / "model", folder, repeats, vllm_python), virtual=False)
            for transport, updated in sizes[each].items():
                print(
                    f"  {transport:18} publish {1e3 * updated.publish_s:7.1f} ms; pause"
                    f" {1e3 * updated.pause_s:7.1f} ms; {updated.tokens_lost} tokens lost;"
                    f" {updated.bytes / 1e6:.1f} MB; {where}"
                )
    report = {
        transport: asdict(last) | {"sizes": {each: asdict(found[transport]) for each, found in sizes.items()}}
        for transport, last in sizes[each].items()
    }
    write(json, report)


if __name__ == "__main__":
    run(main)
