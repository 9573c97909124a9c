"""What an in-flight weight update costs, by transport: time to publish, pause of the engine, lost tokens.

    python benchmarks/weights.py [--size 0.45M|25M] [--repeats N] [--vllm-python PATH] [--json FILE]
    python benchmarks/weights.py --faults [--vllm-python PATH]
    python benchmarks/weights.py --probes 200 [--model FOLDER] [--dtype bfloat16|float32]
    python benchmarks/weights.py --broadcast 4 [--link-mbit 100] [--size 0.45M|25M] [--repeats N]
    python benchmarks/weights.py --killed 20

A trainer publishes its weights. Then one embedded engine, and one vLLM server if its interpreter is given,
serves 32 sequences, and when all are under way it loads the weights with the KV cache kept; an update that
comes when they have ended is repeated. There is a
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

--broadcast: so many embedded engines load a version at the same time, in one transfer (`groups = "one"`) and
in a transfer to each; bfloat16, no requests. With --link-mbit trainer and engines are hosts with links of
that rate (links.py; needs root). The simulator gets the rate at which one engine alone loads, as that of the
network, and predicts both.

    one_s, each_s          from asking to the last engine's answer, medians
    alone_s                the same of one engine alone
    predicted_*_s          load_s of the simulator

--killed: a run of pipelinerl with four engines, in which one engine gets SIGKILL in the middle of each of so
many shared transfers, when the first part of the weights has arrived. The run must go on to its end.

    killed                 engines that died in a transfer
    others, others_loaded  engines that were in those transfers and lived; how many loaded the version
    tokens_lost            generated tokens that were neither trained, parked nor wasted
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import msgspec
from cyclopts import Parameter

from common import QUICKSTART, run, save_model, write
from engine import SIZES, VOCABULARY, Size
from links import TRAINER, LinkedEngineJob, LinkedEngineWorker, linked_hosts
from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import PolicyConfig, config_of, load_config
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import DTYPE, Link, Weights
from tailrace.devices import DeviceMap
from tailrace.drivers.assembly.running import train
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.base import Opening
from tailrace.drivers.weights.settings import FilesystemSettings, ProcessGroupSettings, SharedMemorySettings
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.engine import Alive, EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob, TrainerWorker
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.kind import HttpEngines, VllmServers
from tailrace.record.summary import RunSummary
from tailrace.sim.cluster import rates
from tailrace.sim.settings import SimClusterSettings, SimLengthSettings, SimSettings
from tailrace.types import KV, Group, Prompt, Sample, SampleId

TESTS = Path(__file__).parents[1] / "tests"
sys.path += str(TESTS), str(TESTS / "extras" / "http" / "vllm")
NUM_SEQUENCES, NUM_TOKENS, MAX_CONTEXT = 32, 192, 512
ATTEMPTS = 5
"""Updates that may come too late in succession. On a busy machine the sequences, which a server generates in
one to three seconds, may end before this process has read their first tokens."""
NUM_DECODED, DECODED_TOKENS = 64, 12
"""Sequences and tokens of the decode steps that a probe is compared with."""
SAMPLING = SamplingSettings(max_completion_tokens=NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one update, or the medians of several."""

    publish_s: float
    pause_s: float
    pause_steps: float
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
async def opened(
    model: Path, folder: Path, vllm_python: str | None, device: str = "cpu"
) -> AsyncIterator[dict[str, Pair]]:
    """An engine of each kind, and a trainer for each transport; on a GPU in bfloat16."""
    logs, dtype = folder / "logs", "float32" if device == "cpu" else "bfloat16"
    of_engine = NativeEngineSettings.model_validate({"device": device, "dtype": dtype})
    of_trainer = TrainerSettings.model_validate({"device": device, "dtype": dtype})
    engine_job = EngineJob(model=model, engine=of_engine, sampling=SAMPLING, report_every_s=0.0)
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
                trainer=of_trainer,
                algorithm=AlgorithmSettings(),
                sampling=SAMPLING,
                weights=settings,
                published_dtype=of_engine.dtype,
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
                "engine": {
                    "kind": "vllm",
                    "python": vllm_python,
                    "urls": urls,
                    "args": ["--enforce-eager"],
                    "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
                },
            }
            no_devices, spawner = DeviceMap((None,), (None,)), LocalSpawner(logs)
            config = PolicyConfig.of(config_of(tree))
            opening = Opening(config, folder, None, load_tokenizer(model), spawner, no_devices)
            engine = await HttpEngines(VllmServers(), opening, trainer).begin(f"vllm-{name}", 0)
            stack.push_async_callback(engine.close)
            await engine.ready()
            urls = (str(engine.connection.client.base_url),)  # the others join the first one's server
            pairs[f"vllm_{name}"] = engine, trainer
        yield pairs


def fresh_samples() -> list[Sample]:
    group = Group(Prompt(0, [n % VOCABULARY for n in range(32)]), NUM_SEQUENCES, [])
    return [Sample(SampleId(0, 0, number), group, seed=number) for number in range(NUM_SEQUENCES)]


async def update(pair: Pair, version: int) -> Figures | None:
    """Publish, load while all sequences are under way, and let them end. None: they ended before."""
    engine, trainer = pair
    engine.counter = counter = TimedCounter()
    if isinstance(engine, RemoteEngine):
        engine.transfers = trainer.transfers
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
    if any(sample.spans[-1].version != version for sample in samples):
        return None
    gaps = [(after - before, after) for before, after in pairwise(counter.arrivals)]
    longest = max(gap for gap, end_s in gaps if end_s > load_s)
    pause_s = max(0.0, longest - median(gap for gap, _ in gaps))
    step_s = (counter.arrivals[-1] - counter.arrivals[0] - pause_s) / NUM_TOKENS  # all decode together
    num_tokens = sum(sample.num_tokens for sample in samples)
    own_count = engine.usage().num_counted
    lost = 0 if own_count is None else own_count - counted - num_tokens
    return Figures(
        publish_s=publish_s,
        pause_s=pause_s,
        pause_steps=pause_s / step_s,
        tokens_lost=abs(lost) + NUM_SEQUENCES * NUM_TOKENS - num_tokens,
        bytes=weights.num_bytes,
    )


async def measure(
    model: Path, folder: Path, repeats: int, vllm_python: str | None, device: str = "cpu"
) -> dict[str, Figures]:
    """The medians of each transport. The first update of each is not counted: it connects."""
    figures: dict[str, list[Figures]] = {}
    versions = count(1)  # the engines of one vLLM server share its versions
    async with opened(model, folder, vllm_python, device) as pairs:
        for _ in range(repeats + 1):
            for name, pair in pairs.items():
                for _ in range(ATTEMPTS):
                    if updated := await update(pair, next(versions)):
                        figures.setdefault(name, []).append(updated)
                        break
                else:
                    problem = f"sequences of {NUM_TOKENS} tokens ended before the load {ATTEMPTS} times"
                    sys.exit(f"{name}: {problem}: something else uses the machine; run it again")
    return {
        name: Figures(
            publish_s=median(each.publish_s for each in updates[1:]),
            pause_s=median(each.pause_s for each in updates[1:]),
            pause_steps=median(each.pause_steps for each in updates[1:]),
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


async def load_seconds(engines: Sequence[RemoteEngine], trainer: RemoteTrainer, version: int) -> float:
    weights = await trainer.publish(version)
    start_s = time.perf_counter()
    await asyncio.gather(*(engine.load(weights, kv="keep") for engine in engines))
    return time.perf_counter() - start_s


async def measure_broadcast(
    model: Path, logs: Path, num: int, repeats: int, *, linked: bool
) -> dict[str, float]:
    """Medians of the seconds of one transfer, of a transfer to each, and of one engine alone. The first of
    each is not counted: it connects."""
    weights = ProcessGroupSettings(host=TRAINER if linked else "127.0.0.1", message_timeout_s=300)
    engine = NativeEngineSettings(dtype="bfloat16", health_timeout_s=600)
    common: dict[str, Any] = {"model": model, "engine": engine, "sampling": SAMPLING}
    kind, jobs = (
        (LinkedEngineWorker, [LinkedEngineJob(**common, host=number) for number in range(num)])
        if linked
        else (EngineWorker, [EngineJob(**common)] * num)
    )
    job = TrainerJob(
        model=model,
        trainer=TrainerSettings(),
        algorithm=AlgorithmSettings(),
        sampling=SAMPLING,
        weights=weights,
        published_dtype="bfloat16",
    )
    async with AsyncExitStack() as stack:
        spawner = LocalSpawner(logs)
        trainer = RemoteTrainer([await spawner.start("trainer", TrainerWorker, job)], job)
        stack.push_async_callback(trainer.close)
        engines = [
            RemoteEngine(await spawner.start(f"engine-{number}", kind, each), each)
            for number, each in enumerate(jobs)
        ]
        for each in engines:
            stack.push_async_callback(each.close)
        await asyncio.gather(trainer.ready(), *(each.ready() for each in engines))
        found, versions = {}, count(1)
        forms = {
            "alone_s": (engines[:1], Transfers(trainer.send)),
            "one_s": (engines, trainer.transfers),
            "each_s": (engines, Transfers(trainer.send)),
        }
        for form, (loading, transfers) in forms.items():
            for each in engines:
                each.transfers = transfers
            seconds = [await load_seconds(loading, trainer, next(versions)) for _ in range(repeats + 1)]
            found[form] = median(seconds[1:])
        weights_bytes = (await trainer.publish(next(versions))).num_bytes
        return found | {"bytes": weights_bytes}


def predicted_seconds(model: Path, num: int, bytes_per_s: float) -> dict[str, float]:
    """The simulator's times, with devices that each have a link of a rate."""
    cluster: dict[str, Any] = {"device": "CPU", "devices": num + 1, "rollout_devices": num}
    cluster |= {"model": str(model), "devices_per_node": 1, "link_efficiency": 1.0}
    cluster |= {"network_bytes_per_s": bytes_per_s}
    found = {}
    for groups in ("one", "each"):
        sim = SimSettings(cluster=SimClusterSettings(**cluster, weight_groups=groups))
        sim = sim.changed(lengths=SimLengthSettings(max_tokens=NUM_TOKENS))
        found[f"predicted_{groups}_s"] = rates(sim).engines.load_s
    return found


def print_broadcast(size: Size, num: int, repeats: int, link_mbit: float | None) -> dict[str, float]:
    """Measure and predict both forms."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = Path(name) / "model"
        num_parameters = save_model(model, **SIZES[size])
        if link_mbit:
            stack.enter_context(linked_hosts(num, link_mbit))
        measuring = measure_broadcast(model, Path(name), num, repeats, linked=bool(link_mbit))
        found = clock.run(measuring, virtual=False)
        found |= predicted_seconds(model, num, found["bytes"] / found["alone_s"])
    links = f"links of {link_mbit:g} Mbit/s" if link_mbit else "one host"
    where = f"{num_parameters / 1e6:.2f}M parameters, {found['bytes'] / 1e6:.1f} MB, cpu, {links}, 1 thread"
    print(f"{num} engines; {where} a process; one engine alone {found['alone_s']:.3f} s")
    for form in ("one", "each"):
        live, predicted = found[f"{form}_s"], found[f"predicted_{form}_s"]
        error = f"simulator {predicted:.3f} s ({100 * (predicted / live - 1):+.1f}%)"
        print(f"  {form:5} {live:8.3f} s; {error}; {where} a process")
    return found


class Killer:
    """Kills an engine in the middle of each of so many shared transfers."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._victims: dict[RemoteEngine, int] = {}
        """Engines that will be killed in the transfer of a version."""
        self.killed: dict[int, set[str]] = {}
        """The other engines of each transfer in which one died, by version."""
        self.loaded: set[tuple[int, str]] = set()
        self.failed: list[str] = []
        """Why transfers to one engine failed, or were cancelled."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Watch the embedded engines of this process."""
        load, on_event = RemoteEngine._load, RemoteEngine._on_event

        async def watched_load(engine: RemoteEngine, kv: KV, weights: Weights, link: Link) -> None:
            version, names = weights.version, link.engines
            is_due = len(names) > 1 and len(self.killed) + len(self._victims) < self._num
            if is_due and engine.worker.name == names[version % len(names)]:
                self._victims[engine] = version
            try:
                await load(engine, kv, weights, link)
                self.loaded.add((version, engine.worker.name))
            except BaseException as why:
                if len(names) == 1:
                    self.failed.append(f"version {version}, {names[0]}: {why!r}")
                if self._victims.get(engine) == version and engine.worker.has_ended:
                    self.killed[version] = {*names} - {engine.worker.name}
                raise
            finally:
                self._victims.pop(engine, None)

        def watched_event(engine: RemoteEngine, event: Any) -> None:
            on_event(engine, event)
            if isinstance(event, Alive) and engine in self._victims:
                engine.worker.kill()

        with (
            patch.object(RemoteEngine, "_load", watched_load),
            patch.object(RemoteEngine, "_on_event", watched_event),
            patch.multiple("tailrace.drivers.engine.supervised", FIRST_PAUSE_S=0.1, LONGEST_PAUSE_S=0.5),
        ):
            yield


def print_killed(num: int) -> dict[str, int]:
    """Run it, and print what was lost."""
    schedule = 'name = "pipelinerl", groups_per_step = 4, in_flight_per_engine = 32, ring_groups = 8'
    overrides = {
        "run.rounds": str(2 * num + 5),
        "run.checkpoint_every": "0",
        "run.eval_every": "0",
        "schedule": f"{{ {schedule} }}",
        "engine.replicas": "4",
        "weights": '{ transport = "process_group", bucket_bytes = 4096, message_timeout_s = 50 }',
    }
    killer = Killer(num)
    with tempfile.TemporaryDirectory() as name, killer.at_work():
        train(load_config(QUICKSTART, overrides), Path(name) / "out")
        content = (Path(name) / "out" / "summary.json").read_bytes()
        summary = msgspec.json.decode(content, type=RunSummary)
    tokens = summary.tokens
    others = {(version, each) for version, names in killer.killed.items() for each in names}
    found = {
        "killed": len(killer.killed),
        "others": len(others),
        "others_loaded": len(others & killer.loaded),
        "tokens_generated": tokens.generated,
        "tokens_lost": tokens.generated - tokens.trained - tokens.parked - sum(tokens.wasted.values()),
        "samples_failed": sum(summary.failures.values()),
    }
    print("pipelinerl, 4 engines, 0.45M parameters, cpu, 1 thread a process: ", end="")
    print("; ".join(f"{key} {value}" for key, value in found.items()))
    missed = sorted(f"version {version}, {each}" for version, each in others - killer.loaded)
    for line in [*(f"not loaded: {each}" for each in missed), *killer.failed]:
        print(f"  {line}")
    return found


def main(
    size: Size | None = None,
    repeats: int = 3,
    vllm_python: Annotated[str | None, Parameter(env_var="VLLM_PYTHON")] = None,
    json: Path | None = None,
    faults: bool = False,
    probes: int = 0,
    model: Path = Path("models/SmolLM2-135M-Instruct"),
    dtype: DTYPE | None = None,
    broadcast: int = 0,
    link_mbit: float | None = None,
    killed: int = 0,
) -> None:
    if broadcast:
        write(json, print_broadcast(size or "25M", broadcast, repeats, link_mbit))
        return
    if killed:
        write(json, print_killed(killed))
        return
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
