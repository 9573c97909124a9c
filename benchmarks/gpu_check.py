"""The check list for a machine with a GPU: every part of a run on it, or what was skipped and why.

    make gpu-check        python benchmarks/gpu_check.py [--list] [--only WORD] [--part I N] [--json FILE]

Most checks are short live runs. Every schedule runs on the quickstart's model and task, on the embedded
engine and on vLLM (the interpreter $VLLM_PYTHON). The parts of a run, from LoRA to a trainer sharded over two
GPUs, run there, too. The runs named "real shape" train a model of the shape of Qwen3-0.6B with random
weights. A run passes if it ends, each of its steps has a finite gradient, and the log-probs of engine and
trainer differ by less than MAX_MISMATCH_KL. The other checks drive an engine, a trainer or a publication in
this process, and look at kernels, memory and micro-batches.

All compute in bfloat16, except where a check names float32. --list prints the checks and what each would
have caught. Parts of an odd number of parts, as --part 1 5, may run side by side. Without a GPU those that a
CPU can run are run on it, with a small model, and the list says what was skipped. The exit code is 1 if a
check failed.
"""

import json as jsons
import math
import multiprocessing
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from common import QUICKSTART, QWEN3, run, save_model, write
from tailrace.api import train
from tailrace.config import load_config
from tailrace.errors import TailraceError
from tailrace.record.figures import steps_of
from tailrace.record.metrics import read_rows

ROUNDS = 3
MAX_MISMATCH_KL = 0.02
"""In nats a token, between engine and trainer with the same bfloat16 weights."""
SCHEDULES = tomllib.loads(Path(__file__).with_name("race.toml").read_text(encoding="utf-8"))["schedules"]
"""The parameters of every schedule."""
VERIFYING = ("bubblespec",)
"""Schedules that need an engine which draws its tokens again. vLLM does not."""
VLLM = '{ kind = "vllm", dtype = "bfloat16", max_num_seqs = 256, args = ["--gpu-memory-utilization", "0.3"] }'
SLEEPING_VLLM = VLLM.replace('"0.3"]', '"0.3", "--enable-sleep-mode"]')
"""Gives its memory back when it sleeps."""
SMALL = QWEN3 | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
"""On a CPU."""
PUBLICATION_S = 10.0
"""For one publication of the real shape, with its comparison."""
LIVE_FAULTS = "the schedule's order of generation, training and publication on real devices"


@dataclass(frozen=True, slots=True)
class Check:
    """One live run, or one measurement.

    Args:
        catches: the fault that it would have caught.
        overrides: of the quickstart's config.
        num_gpus: CUDA devices that it needs; 0: a CPU can run it.
        measure: takes the folder of a model of the real shape and a device; returns what is wrong. None: the
            check is a live run.
        has_real_shape: the run trains that model.
    """

    name: str
    catches: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    needs_vllm: bool = False
    measure: Callable[[Path, str], str | None] | None = None
    has_real_shape: bool = False
    why_gpu: str = ""

    def skipped(self, num_gpus: int, vllm: str | None) -> str | None:
        """Why it cannot run here; None: it can."""
        if num_gpus < self.num_gpus:
            why = f"needs {self.num_gpus} CUDA device{'s' * (self.num_gpus > 1)}, found {num_gpus}"
            return f"{why}: {self.why_gpu}" if self.why_gpu else why
        if self.needs_vllm and not vllm:
            return "needs vLLM: set $VLLM_PYTHON to the interpreter of its environment"
        return None


def checks(device: str = "cuda") -> list[Check]:
    """The whole list, for a machine with GPUs ("cuda") or without ("cpu")."""
    found = []
    native = f'{{ device = "{device}", dtype = "bfloat16", max_num_seqs = 256 }}'
    devices, one, two = ("gpus", 1, 2) if device == "cuda" else ("cpus", 0, 0)
    for schedule in SCHEDULES:
        of = _overrides(device, _bound(schedule))
        found.append(Check(f"{schedule}, embedded engine", LIVE_FAULTS, of | {"engine": native}, one))
        if schedule not in VERIFYING:
            found.append(Check(f"{schedule}, vLLM", LIVE_FAULTS, of | {"engine": VLLM}, 1, needs_vllm=True))

    def placed(kind: str, engines: str, trainer: str) -> dict[str, str]:
        placement = f'kind = "{kind}", devices = "{devices}", engines = {engines}, trainer = {trainer}'
        return {"placement": f"{{ {placement} }}"}

    together, elastic = placed("colocated", "[[0]]", "[[0]]"), placed("elastic", "[[0], [1]]", "[[1], [0]]")
    serial, eager = _bound("serial"), _bound("rolloutpipe_eager")
    two_engines = {"trainer.replicas": "2", "engine": native.replace("{ ", "{ replicas = 2, ")}
    nccl = {"weights": '{ transport = "process_group", backend = "nccl" }'}
    gloo = {"weights": '{ transport = "process_group", backend = "gloo" }'}
    judge = (
        f'kind = "local", path = "{QUICKSTART.parent / "model"}", template = "{{completion}}", '
        f'labels = ["1", "2"], device = "{device}", dtype = "bfloat16", memory_mib = 2, max_tokens = 400'
    )  # the model that is trained judges, with less memory than its layers need
    apart = placed("disaggregated", "[[0]]", "[[1]]")
    spread = placed("disaggregated", "[[0], [1]]", "[[2]]")
    several = {"engine": native.replace("{ ", "{ replicas = 2, ")}
    sharded = {"trainer.ranks": "2"} | placed("colocated", "[[0]]", "[[0, 1]]")
    woken = "an engine wakes after the trainer computed on the same GPU: cached memory"
    refused = "NCCL refuses two ranks on one GPU"
    recomputed, streamed = "the second forward pass", "pinned memory, copies beside computation"
    offloaded = "weights that change while they are copied"
    recomputed_policy = {"algorithm.old_policy": "recomputed"}
    parts: list[tuple[str, str, dict[str, str], int, str]] = [
        ("LoRA", "an adapter", {"trainer.lora": '{ rank = 16, publish = "adapter" }'}, one, ""),
        ("colocated", "an engine that sleeps and wakes", together, one, ""),
        ("colocated, real shape", woken, together, one, ""),
        ("elastic, real shape", woken, eager | elastic | two_engines, two, ""),
        ("weights by gloo", "a transfer that training overtakes", gloo, one, ""),
        ("weights by NCCL", "a transfer on the stream of the training", nccl | apart, 2, refused),
        ("weights by gloo to two engines", "a broadcast over several engines", gloo | several, one, ""),
        (
            "weights by NCCL to two engines",
            "a broadcast over three GPUs",
            nccl | spread | several,
            3,
            refused,
        ),
        ("weights by NCCL, real shape", "a second model on the GPU", nccl | apart, 2, refused),
        ("trainer of two ranks", "collectives of NCCL", sharded, two, refused),
        ("activation checkpointing", recomputed, {"trainer.activation_checkpointing": "true"}, one, ""),
        ("judge with streamed layers", streamed, {"reward.judges": f"[{{ {judge} }}]"}, one, ""),
        ("CPU offload", offloaded, {"trainer.cpu_offload": "true"} | recomputed_policy, one, ""),
    ]
    for name, catches, overrides, num_gpus, why in parts:
        of = _overrides(device, serial | {"engine": native} | overrides)
        real = "real shape" in name
        name = f"{name}, embedded engine"
        found.append(Check(name, catches, of, num_gpus, has_real_shape=real, why_gpu=why))
    slept = _overrides(device, serial | together | {"engine": SLEEPING_VLLM})
    reserved = "a server that reserves a KV cache for the model's whole context: --max-model-len"
    served = _overrides(device, serial | {"engine": VLLM})
    plans = "cuDNN makes a plan for each shape of a decode step"
    grown = "old and new tensors at once while the KV cache grows"
    math_attention = "attention falls back to math and makes [heads, T, T]"
    counted = partial(Check, num_gpus=1, why_gpu="its memory is counted by CUDA's allocator")
    single = "micro-batches of one group, far below the limit"
    copied = "a copy through the host's memory, or a bit that is lost"
    compared = "the comparison of two publications stops training"
    found += [
        Check("colocated, vLLM", "an engine that sleeps and wakes", slept, 1, needs_vllm=True),
        Check("real shape, vLLM", reserved, served, 1, needs_vllm=True, has_real_shape=True),
        Check("decode kernels", plans, measure=decode_kernels),
        counted("KV budget", grown, measure=kv_budget),
        counted(
            "sleeping trainer", "state, or cached memory, that stays on the GPU", measure=sleeping_trainer
        ),
        counted("float32 with grouped heads", math_attention, measure=float32_attention),
        Check("micro-batches", single, measure=full_micro_batches),
        Check("weights from device to device", copied, num_gpus=two, measure=device_to_device),
        Check("publication", compared, measure=publication),
    ]
    return found


def _bound(schedule: str) -> dict[str, str]:
    parameters = {"name": schedule, **SCHEDULES[schedule]}
    words = (f"{key} = {jsons.dumps(value)}" for key, value in parameters.items())
    return {"schedule": f"{{ {', '.join(words)} }}"}


def _overrides(device: str, chosen: Mapping[str, str]) -> dict[str, str]:
    run = {"run.rounds": str(ROUNDS), "run.eval_every": "0", "run.checkpoint_every": "0"}
    trainer = {"trainer.dtype": "bfloat16", "trainer.device": device}
    return {**run, **trainer, **chosen}


def make_model(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Save a model with random weights in bfloat16, and the quickstart's tokenizer."""
    save_model(folder, dtype="bfloat16", **shape)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(QUICKSTART.parent / "model" / name, folder)
    return folder


def _generate(folder: Path, device: str, budget: int, num_requests: int, length: int) -> None:
    from tailrace.contracts.engine import GenerationRequest
    from tailrace.contracts.sampling import SamplingSettings
    from tailrace.drivers.engine.native.engine import NativeEngine
    from tailrace.drivers.engine.settings import NativeEngineSettings

    settings = NativeEngineSettings(device=device, dtype="bfloat16", kv_cache_tokens=budget)
    sampling = SamplingSettings(max_completion_tokens=length)
    engine = NativeEngine(folder, settings, sampling)
    for number in range(num_requests):
        engine.submit(GenerationRequest(f"{number}", [5] * (1 + 7 * number % 100), (), number))
    while not engine.idle:
        engine.step()


def decode_kernels(folder: Path, device: str) -> str | None:
    """Prefills and decode steps of many shapes."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        _generate(folder, device, 8192, 12, 40)
    names = {event.key for event in profiler.key_averages()}
    if not any("scaled_dot_product" in name for name in names):
        return "the profiler saw no attention"
    plans = sorted(name for name in names if "cudnn" in name.lower() and "attention" in name.lower())
    return f"cuDNN computed attention: {', '.join(plans[:3])}" if plans else None


def _peak_bytes(work: Callable[[], object]) -> int:
    """What CUDA's allocator counts at most, above what it counts before."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def kv_budget(folder: Path, device: str) -> str | None:
    """Sequences that outgrow a small cache."""
    from tailrace.contracts.memory import ModelShape
    from tailrace.drivers.assembly.machine import CUDA_BYTES
    from tailrace.drivers.engine.settings import NativeEngineSettings
    from tailrace.drivers.kinds.native import engine_memory

    budget = 65_536
    settings = NativeEngineSettings(device=device, dtype="bfloat16", kv_cache_tokens=budget)
    shape = ModelShape.read(folder)
    allowed = engine_memory(shape, settings, budget).device_bytes + CUDA_BYTES
    peak = _peak_bytes(partial(_generate, folder, device, budget, 128, 1000))
    return f"the engine allocated {peak:,} bytes, counted were {allowed:,}" if peak > allowed else None


def float32_attention(folder: Path, device: str) -> str | None:
    """One layer of the real shape, forward and backward."""
    import torch

    from tailrace.drivers.trainer.attention import packed_causal_attention

    length, heads, kv_heads, dim = 8192, 16, 8, 128
    q, k, v = (
        torch.randn(1, num, length, dim, device=device, requires_grad=True)
        for num in (heads, kv_heads, kv_heads)
    )
    boundaries = torch.tensor([0, length], dtype=torch.int32, device=device)
    attend = partial(
        packed_causal_attention,
        torch.nn.Identity(),
        q,
        k,
        v,
        None,
        cu_seq_lens_q=boundaries,
        sequence_lengths=[length],
    )
    peak, square = _peak_bytes(lambda: torch.autograd.backward(attend()[0].sum())), 4 * heads * length**2
    return f"attention took {peak:,} bytes; [H, L, L] takes {square:,}" if peak >= square else None


def _trainer(folder: Path, **settings: object) -> Any:
    from tailrace.algo.base import AlgorithmSettings
    from tailrace.contracts.sampling import SamplingSettings
    from tailrace.contracts.trainer import TrainerSettings
    from tailrace.drivers.trainer.trainer import TorchTrainer

    given = TrainerSettings.model_validate({"dtype": "bfloat16", **settings})
    return TorchTrainer(folder, given, AlgorithmSettings(), SamplingSettings(max_completion_tokens=1024))


def _group(number: int, length: int) -> list[Any]:
    """Eight samples with an advantage."""
    from tailrace.drivers.trainer.batch import TrainingSample
    from tailrace.types import SampleId

    ids = [SampleId(number, 0, index) for index in range(8)]
    return [TrainingSample(id, [5], [6] * length, [-5.0] * length, 1.0) for id in ids]


def _arrived(weights: Any, link: Any, device: str, answers: Any) -> None:
    """An engine: receive a publication, and answer with where it lies and its checksums."""
    from tailrace.drivers.weights.tensors import checksums
    from tailrace.drivers.weights.transports import WeightReceiver

    tensors = WeightReceiver(device=device).receive(weights, link)
    answers.put(({tensor.device.type for tensor in tensors.values()}, checksums(tensors)))


def device_to_device(folder: Path, device: str) -> str | None:
    """A publication of 64 MB from the first device to the second, by NCCL; on a CPU by gloo."""
    import torch

    from tailrace.contracts.weights import new_link
    from tailrace.drivers.weights.process_group import ProcessGroupSender
    from tailrace.drivers.weights.settings import ProcessGroupSettings
    from tailrace.drivers.weights.tensors import checksums

    backend, first, second = ("nccl", "cuda:0", "cuda:1") if device == "cuda" else ("gloo", "cpu", "cpu")
    settings = ProcessGroupSettings.model_validate({"backend": backend, "bucket_bytes": 2**24})
    sender = ProcessGroupSender(settings, first)
    tensors = {f"{n}": torch.randn(2**20, device=first).bfloat16() for n in range(32)}
    weights, link = sender.store(tensors, 1), new_link("engine-0")
    spawned = multiprocessing.get_context("spawn")
    answers = spawned.Queue()
    engine = spawned.Process(target=_arrived, args=(weights, link, second, answers))
    engine.start()
    sender.send(1, link)
    devices, found = answers.get(timeout=60)
    engine.join()
    if devices != {device}:
        return f"the tensors lie on {devices}"
    return None if found == checksums(tensors) else "the checksums differ"


def full_micro_batches(folder: Path, device: str) -> str | None:
    """Groups that come one by one, with a bit more than half a micro-batch each."""
    limit = 8192 if device == "cuda" else 600
    smallest = {} if device == "cuda" else {"min_tokens_per_microbatch": limit}
    trainer = _trainer(folder, device=device, max_tokens_per_microbatch=limit, **smallest)
    length = limit // 14  # eight samples are 0.57 of a micro-batch
    for group in range(14):
        trainer.accumulate([_group(group, length)])
    num, least = trainer.step().num_micro_batches, math.ceil(14 * 8 * length / limit)
    return f"{num} micro-batches, where {least} hold the tokens" if num > least + 1 else None


def publication(folder: Path, device: str) -> str | None:
    """The second publication, which is compared with the first."""
    from tailrace.drivers.weights.filesystem import FilesystemSender
    from tailrace.drivers.weights.tensors import Publisher

    trainer = _trainer(folder, device=device)
    sender = FilesystemSender.in_shared_memory()
    try:
        publisher = Publisher(sender, "bfloat16", trainer.weights())
        started = time.perf_counter()
        publisher.publish(trainer.export_weights(), 1)
        seconds = time.perf_counter() - started
    finally:
        sender.close()
    return f"a publication took {seconds:.1f} s" if seconds > PUBLICATION_S else None


def sleeping_trainer(folder: Path, device: str) -> str | None:
    """A step, a sleep and a wake, twice. Prints the GiB that CUDA's allocator counts."""
    import torch

    from tailrace.contracts.memory import GIB, STATE_BYTES, ModelShape
    from tailrace.drivers.workers.process import give_memory_back

    def step() -> None:
        trainer.accumulate([_group(0, 64)])
        trainer.step()

    trainer, allocated = _trainer(folder, device=device), torch.cuda.memory_allocated
    state = sum(STATE_BYTES.values()) * ModelShape.read(folder).num_parameters
    for _ in range(2):
        found = {"before": allocated(), "peak": allocated() + _peak_bytes(step), "awake": allocated()}
        trainer.sleep()
        give_memory_back()
        found |= {"asleep": allocated(), "reserved": torch.cuda.memory_reserved()}
        trainer.wake(early=True)
        found["early"] = allocated()
        trainer.wake()
        found["woken"] = allocated()
        words = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.items())
        print(f"         sleeping trainer, state {state / GIB:.2f} GiB: {words}")
        gave_back = found["awake"] - found["asleep"]
        is_cached = found["reserved"] > found["asleep"] + 0.1 * state
        if gave_back < 0.99 * state or is_cached or abs(found["woken"] - found["awake"]) > 0.01 * state:
            return f"its state has {state:,} bytes; {words}"
    return None


@dataclass(slots=True)
class Results:
    """Names of checks, by what became of them."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def run_check(check: Check, folder: Path, model: Path, device: str) -> str | None:
    """Run it; returns what is wrong, or None.

    Args:
        folder: for the run.
        model: the folder of the real shape.
    """
    if check.measure:
        try:
            return check.measure(model, device)
        except Exception as error:  # the next check is another part
            return f"{type(error).__name__}: {error}"
    real = {"model.path": str(model), "sampling.max_completion_tokens": "64"} if check.has_real_shape else {}
    try:
        train(load_config(QUICKSTART, {**check.overrides, **real}), folder)
    except TailraceError as error:
        return str(error)
    steps = steps_of(read_rows(folder / "metrics.jsonl"))
    if not steps:
        return "no optimizer step"
    if any(row["skipped"] for row in steps):
        return "a gradient was not finite"
    mismatch = max((row.get("engine_mismatch_kl", 0.0) for row in steps), default=0.0)
    if mismatch > MAX_MISMATCH_KL:
        return f"the log-probs of engine and trainer differ: KL {mismatch:.4f} > {MAX_MISMATCH_KL}"
    return None


def run_all(chosen: Sequence[Check], num_gpus: int, vllm: str | None, json: Path | None = None) -> Results:
    """Run what can run here, print a line for each, and write what is known after it."""
    results = Results()
    device = "cuda" if num_gpus else "cpu"
    with tempfile.TemporaryDirectory() as models:
        model = make_model(Path(models), QWEN3 if num_gpus else SMALL)
        for check in chosen:
            if why := check.skipped(num_gpus, vllm):
                results.skipped[check.name] = why
                print(f"skipped  {check.name}: {why}")
                continue
            with tempfile.TemporaryDirectory() as folder:
                why = run_check(check, Path(folder) / "run", model, device)
            if why:
                results.failed[check.name] = why
            else:
                results.passed.append(check.name)
            print(f"FAILED   {check.name}: {why}" if why else f"passed   {check.name}", flush=True)
            write(json, asdict(results))
    print(f"{len(results.passed)} passed, {len(results.failed)} failed, {len(results.skipped)} skipped")
    return results


def main(
    list: bool = False,
    only: Annotated[str, Parameter(help="checks whose name has this word")] = "",
    part: Annotated[tuple[int, int], Parameter(help="I N: every N-th check, from the I-th")] = (1, 1),
    json: Path | None = None,
) -> None:
    import torch

    num_gpus = torch.cuda.device_count()
    chosen = [check for check in checks("cuda" if num_gpus else "cpu") if only in check.name]
    if not chosen:
        raise SystemExit(f"no check has {only!r} in its name; --list prints the names")
    first, number = part
    if not 1 <= first <= number:
        raise SystemExit(f"--part {first} {number}: the first number must be 1 to {number}")
    chosen = chosen[first - 1 :: number]
    if list:
        width = max(len(check.name) for check in chosen)
        print("\n".join(f"{check.name:{width}}  {check.catches}" for check in chosen))
        return
    results = run_all(chosen, num_gpus, os.environ.get("VLLM_PYTHON"), json)
    if results.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
