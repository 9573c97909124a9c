"""Opens the parts of a live run: processes of engines, trainer, reference, reward functions and judges;
prompts, and the environment."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config import LiveConfig, PolicyConfig, RunConfig
from tailrace.contracts.engine import Engine
from tailrace.contracts.reward import Rewards
from tailrace.contracts.trainer import Reference, Trainer
from tailrace.controller.base import RunComponents
from tailrace.devices import DeviceMap
from tailrace.drivers.assembly.environments import calls_reward_functions, open_episodes, run_prompts
from tailrace.drivers.assembly.placement import device_map, device_sharing, prices_of, trainer_cpus_reserved
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer, text_of
from tailrace.drivers.data.open import first_of_each_source
from tailrace.drivers.kinds.base import Opening, engine_kind, trainer_kind
from tailrace.drivers.kinds.hooks import ProgramRewards
from tailrace.drivers.kinds.teacher import begin_teachers
from tailrace.drivers.reward.calls import column_of
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.kinds import Judge, NoFunctions, WithJudges, judge_kind
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.hosts import host_kind
from tailrace.drivers.workers.reward import RewardPool
from tailrace.drivers.workers.reward_process import RewardJob, RewardWorker
from tailrace.errors import ConfigError, EnginesLost, NotArrived, WorkerDied, first_cause, say
from tailrace.kinds import kind_of
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Prompt


@asynccontextmanager
async def open_parts(
    config: LiveConfig, folder: Path, *, life: int | None = None
) -> AsyncIterator[RunComponents]:
    """Start the workers of a checked config, score one row, and end the workers with the block. Arguments and
    errors as `open_workers`; a ConfigError, too, if the reward function is defective."""
    tokenizer, anchors = load_tokenizer(config.model.path, config.model.template_date), Anchors()
    async with open_workers(config, folder, tokenizer, life=life) as opened:
        _check_capabilities(config, opened.engines)
        prompts = run_prompts(config, tokenizer, "train")
        checked = first_of_each_source(prompts)
        rewards = await _scorers(config, opened.rewards, opened.judges, checked, anchors, tokenizer)
        async with open_episodes(config, tokenizer, opened.reference) as run_episode:
            yield RunComponents(
                engines=opened.engines,
                trainer=opened.trainer,
                rewards=rewards,
                prompts=prompts,
                held_out=run_prompts(config, tokenizer, "eval"),
                pools=config.data.pools,
                reference=opened.reference,
                sharing=device_sharing(config),
                anchors=anchors,
                synchronous_rewards=config.reward.synchronous,
                run_episode=run_episode,
                prices=prices_of(config),
            )


@asynccontextmanager
async def open_scorers(config: LiveConfig, folder: Path) -> AsyncIterator[Rewards]:
    """Start what scores the samples of a checked config alone, as `open_parts`."""
    tokenizer = load_tokenizer(config.model.path)
    async with _opening(config, folder, tokenizer, DeviceMap((), ())) as opening:
        functions, judges = await _begin_rewards(opening)
        await _all_done(*(worker.ready() for worker in opening.started))
        async with ended_by_death(opening.started):
            yield await _scorers(config, functions, judges, (), Anchors(), tokenizer)


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a run, ready for requests."""

    engines: tuple[Engine, ...]
    trainer: Trainer
    rewards: RewardPool | None
    """Workers of reward functions; None: no function is called."""
    judges: tuple[Judge, ...]
    reference: Reference | None
    """The reference model, or the teachers; None: the algorithm needs none."""


@asynccontextmanager
async def open_workers(
    config: PolicyConfig, folder: Path, tokenizer: Tokenizer, *, life: int | None = None
) -> AsyncIterator[Workers]:
    """Start all workers of a checked config concurrently, and end them with the block, however it ends.

    An engine that dies is restarted. The block is cancelled if another worker dies, or if no engine comes
    back. To train again from the start with the same workers: first `trainer.save`; later `trainer.restore`,
    publish, and load with kv="recompute".

    Args:
        folder: folder of the run; the workers' output goes to its `logs/`.
        life: number of the run's life; the tokens of each engine are then counted in `counts/`.

    Raises:
        ConfigError: a worker cannot do its job.
        WorkerDied: a worker ended; with its name, the exit cause and the end of its log.
        EnginesLost: all engines were dead for `engine.recovery_timeout_s`.
        NotArrived: an engine did not get a publication after a restart either.
    """
    devices = device_map(config)
    engines_of, trainer_of = engine_kind(config), trainer_kind(config)
    with trainer_cpus_reserved(devices):
        async with _opening(config, folder, tokenizer, devices, life) as opening:
            rewards, judges = await _begin_rewards(opening)
            trainer = await trainer_of.begin(opening)
            async with ended_by_death((), *opening.watching()):
                engines = engines_of.begin(opening, trainer)
                if config.teacher:
                    reference: Reference | None = await begin_teachers(opening)
                else:
                    reference = await trainer_of.reference(opening, trainer)
                if config.placement.takes_turns:
                    await trainer.ready()
                    await trainer.sleep()  # a server takes the memory that it finds free
                workers = [worker.ready() for worker in opening.started]
                await _all_done(trainer.ready(), *(each.open() for each in engines), *workers)
                async with ended_by_death(opening.started, *opening.watching()):
                    yield Workers(tuple(engines), trainer, rewards, judges, reference)


@asynccontextmanager
async def open_trainer(config: PolicyConfig, folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Trainer]:
    """Start the trainer of a checked config alone, and end it with the block. Raises as `open_workers`."""
    async with _opening(config, folder, tokenizer, device_map(config)) as opening:
        trainer = await trainer_kind(config).begin(opening)
        await _all_done(trainer.ready(), *(worker.ready() for worker in opening.started))
        async with ended_by_death(opening.started, *opening.watching()):
            yield trainer


@asynccontextmanager
async def _opening(
    config: PolicyConfig, folder: Path, tokenizer: Tokenizer, devices: DeviceMap, life: int | None = None
) -> AsyncIterator[Opening]:
    """Open the host of workers of a run, and close them with the block."""
    async with host_kind(config.host).open(config.host, config, folder) as spawner:
        opening = Opening(config, folder, life, tokenizer, spawner, devices)
        try:
            yield opening
        finally:
            closing = [*(worker.close for worker in opening.started), *opening.closing]
            await asyncio.gather(*(close() for close in closing))


async def _begin_rewards(opening: Opening) -> tuple[RewardPool | None, tuple[Judge, ...]]:
    """Start the reward workers, if reward functions are called, and the judges."""
    config = opening.config
    reward, pool = host_kind(config.host).rewards_there(config.reward), None
    if calls_reward_functions(config):
        job = RewardJob(reward=reward, data=LiveConfig.of(config).data)
        scorers = [await opening.start(RewardWorker, f"scorer-{i}", job) for i in range(reward.workers)]
        pool = RewardPool(scorers, opening.tokenizer, reward)
    judges = [await judge_kind(each).begin(each, opening.start, reward.timeout_s) for each in reward.judges]
    opening.closing += [judge.close for judge in judges]
    return pool, tuple(judges)


async def _scorers(
    config: LiveConfig,
    functions: RewardPool | None,
    judges: Sequence[Judge],
    checked: Sequence[Prompt],
    anchors: Anchors,
    tokenizer: Tokenizer,
) -> Rewards:
    """Open the scorers of samples: reward functions, programs in place of them, judges beside them. The
    functions score the `checked` rows, if one is called, and an empty program runs in the sandbox."""
    code, text = config.reward.code, text_of(tokenizer)
    if functions:
        understood = Scorer.load(config.reward, config.data).describe()
        for prompt in checked:
            if code and column_of(prompt.row, code.column) is not None:
                continue
            num = config.run.group_size if config.reward.batch == "group" else 1
            if warning := await functions.check_one_row(prompt, understood, num):
                say(f"warning: {warning}")
    scorers: Rewards = functions or NoFunctions()
    if code:
        others = scorers if functions or config.reward.judges else None
        programs: ProgramRewards = kind_of("reward", "code")
        scorers = await programs.open(config.reward, anchors, text, others)
    if judges:
        scorers = WithJudges(scorers, judges, text, drop_timeouts=config.reward.on_timeout == "drop")
    return scorers


def _check_capabilities(config: RunConfig, engines: Sequence[Engine]) -> None:
    """Raises a ConfigError if the placement or the evaluations need what an engine cannot do."""

    def lack(capability: str) -> list[str]:
        return [each.name for each in engines if not getattr(each.capabilities, capability)]

    if inexact := lack("exact_versions"):
        problem = f"{', '.join(inexact)} cannot say which weights generated a token"
        effect = "after an update in flight, some tokens may count as one version newer than they are"
        say(f"warning: {problem}: {effect}; update the server")
    probed = "probe_every" in config.weights.model_fields_set and config.weights.probe_every
    if probed and (mute := lack("scores")):
        problem = f"{mute[0]} cannot prove that weights have arrived: it does not score a given sequence"
        remedy = "set it to 0; the embedded engine can, and vLLM with sampling.temperature = 1"
        raise ConfigError("weights.probe_every", config.weights.probe_every, problem, remedy)
    if config.run.eval_top_p is not None and (whole := lack("top_p")):
        problem = f"{whole[0]} takes no top-p of a request's own"
        remedy = "remove it; the embedded engine can, vLLM, SGLang and Tinker"
        raise ConfigError("run.eval_top_p", config.run.eval_top_p, problem, remedy)
    if config.placement.takes_turns and (awake := lack("sleep")):
        problem = f"{awake[0]} cannot give the memory of its devices back"
        remedy = 'add "--enable-sleep-mode" to engine.args of vLLM, or write "disaggregated"'
        raise ConfigError("placement.kind", config.placement.kind, problem, remedy)


async def _all_done(*starts: Coroutine[Any, Any, None]) -> None:
    """Wait for all. If one fails, the others are cancelled, and an engine that is about to start is ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for start in starts:
                tasks.create_task(start)
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


@asynccontextmanager
async def ended_by_death(
    processes: Iterable[RemoteWorker], *watches: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Cancel the block when a process ends, or when a watch gives up.

    Raises:
        WorkerDied: of that process.
        EnginesLost, NotArrived: of a watch.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(each.died()) for each in processes]
            watchers += map(tasks.create_task, watches)
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except BaseExceptionGroup as group:
        error = first_cause(group.subgroup((WorkerDied, EnginesLost, NotArrived)) or group)
        raise error from error.__cause__
