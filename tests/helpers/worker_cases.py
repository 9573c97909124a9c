"""Samples, jobs and processes for the tests of the workers."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tailrace.algo.base import AlgorithmSettings
from tailrace.config import ModelSettings, RunConfig
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.open import Workers, open_workers
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.weights.settings import SharedMemorySettings, WeightsSettings
from tailrace.drivers.workers.base import LocalHostSettings
from tailrace.drivers.workers.engine import EngineJob, EngineWorker, RemoteEngine
from tailrace.drivers.workers.process import LocalProcess, LocalSpawner
from tailrace.types import Group, Prompt, Sample, SampleId

VOCABULARY = 32
TRAINER = TrainerSettings(learning_rate=1e-2)


def make_samples(
    num: int, *, prompt_ids: Sequence[int] = (5, 6, 7), row: Mapping[str, object] | None = None
) -> list[Sample]:
    """Fresh samples of one prompt."""
    prompt = Prompt(index=0, ids=prompt_ids, text="what?", row={} if row is None else row)
    group = Group(prompt, num_required=num, samples=[])
    group.samples += [Sample(SampleId(0, 0, index), group, seed=index) for index in range(num)]
    return group.samples


def is_running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


async def until_gone(*pids: int) -> None:
    while any(is_running(pid) for pid in pids):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def words_of(logs: Path, name: str) -> str:
    return (logs / f"{name}.log").read_text()


class Letters:
    """A tokenizer whose token 1 is "a", token 2 "b" and so on; token 0 is special."""

    chat_template: str | None = None
    eos_token_id: int | None = 0
    clean_up_tokenization_spaces = True
    backend_tokenizer: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + id - 1) for id in token_ids if id or not skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        raise NotImplementedError


@asynccontextmanager
async def workers(
    model: Path,
    folder: Path,
    *,
    function: str = "helpers.reward_cases:score",
    algorithm: AlgorithmSettings | None = None,
    trainer: TrainerSettings | None = None,
    weights: WeightsSettings | None = None,
    host: LocalHostSettings | None = None,
) -> AsyncIterator[Workers]:
    config = RunConfig(
        run=RunSettings(rounds=1, group_size=2),
        schedule={"name": "serial"},
        model=ModelSettings(path=model),
        sampling=SamplingSettings(max_completion_tokens=40),
        algorithm=algorithm or AlgorithmSettings(),
        trainer=trainer or TRAINER,
        weights=weights or SharedMemorySettings(),
        reward=RewardSettings(function=function),
        data=RowsSettings(path=Path("rows.jsonl")),
        host=host or LocalHostSettings(),
    )
    async with open_workers(config, folder, Letters()) as opened:
        yield opened


def pids_of(opened: Workers) -> list[int]:
    return [opened.trainer.workers[0].process.pid, *(process_of(engine).pid for engine in opened.engines)]


def process_of(engine: SupervisedEngine) -> LocalProcess:
    """The process in which an engine runs now."""
    remote = engine._process
    assert isinstance(remote, RemoteEngine)
    return remote.worker.process


async def start_engine(name: str, job: EngineJob, logs: Path) -> RemoteEngine:
    return RemoteEngine(await LocalSpawner(logs).start(name, EngineWorker, job), job)
