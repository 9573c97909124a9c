"""The parts of a live run: data, worker processes, judges, and their checks."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path

from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import LiveConfig, Policy, PolicyConfig, RunConfig
from tailrace.contracts.data import Prompts, Split
from tailrace.contracts.engine import Engine
from tailrace.contracts.memory import ModelShape
from tailrace.contracts.reward import Rewards
from tailrace.contracts.trainer import TrainerSettings
from tailrace.controller.base import RunComponents
from tailrace.devices import check_device
from tailrace.drivers.assembly.environments import (
    calls_reward_functions,
    check_episodes,
    open_episodes,
    prompts_of_episodes,
    unused_rewards,
)
from tailrace.drivers.assembly.folder import ONLY_OF_THE_TRAINER, RunFolder
from tailrace.drivers.assembly.machine import Fitted, Machine, check_devices, fit, uses_gpu
from tailrace.drivers.assembly.placement import check_placement, device_sharing, prices_of
from tailrace.drivers.assembly.schedule import BoundSchedule, trains_while_generating
from tailrace.drivers.assembly.simulation import most_groups
from tailrace.drivers.assembly.workers import open_reward_workers, open_workers
from tailrace.drivers.data.encoding import OPEN_TAG, PromptEncoder, Tokenizer, load_tokenizer, text_of
from tailrace.drivers.data.open import check_lengths, open_prompts
from tailrace.drivers.environments.open import environment_kind
from tailrace.drivers.kinds.base import engine_kind, trainer_kind
from tailrace.drivers.kinds.teacher import check_teachers
from tailrace.drivers.kinds.tracker import check_trackers
from tailrace.drivers.reward.calls import column_of
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.kinds import Judge, NoFunctions, WithJudges, judge_kind
from tailrace.drivers.reward.settings import check_sources
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, verify
from tailrace.drivers.workers.hosts import check_host
from tailrace.drivers.workers.process import preload
from tailrace.drivers.workers.reward import RewardPool
from tailrace.errors import BadRow, ConfigError, say
from tailrace.kinds import kind_of
from tailrace.model_folder import asks_for_date, context_length, end_of_text_ids, read_config
from tailrace.record.sinks import import_sinks
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Prompt

CHECKED_ROWS = 16
"""Rows whose columns the parameters of the reward function are matched to. A row may lack some of them."""
MEASURED_PROMPTS = 256
"""Prompts of which the longest stands for all in the estimate of memory."""
MOST_MEASURED = 4096
"""Prompts of a round that are looked at for rows that come twice."""
SMALL_MODEL = 20_000_000
"""Parameters; smaller models are trained with larger learning rates."""
MAX_BAD_ROWS = 1000
"""Rows without a usable prompt that are skipped in the search for usable ones."""


def dated(config: Policy, earlier: RunFolder | None = None) -> Policy:
    """Return the config with the day that the chat template tells, if it asks for the date: its own, that of
    the earlier life of the run, or today. So a prompt has the same tokens whenever it is written."""
    path, day = config.model.path, config.model.template_date
    if day is None and earlier:
        with suppress(ConfigError):  # no life of it has begun
            day = model.template_date if (model := earlier.read_config().model) else None
    if day is None and asks_for_date(path):
        day = date.fromtimestamp(clock.wall_time())
        say(f"the chat template can ask for the date: it gets {day} in all prompts (model.template_date)")
    return config.changed(model={"template_date": day})


def begin_start(config: RunConfig) -> None:
    """Say that a command starts, and let the modules of its workers be imported beside its checks."""
    say("loads the tokenizer, the data and the reward, and the modules of the workers beside them")
    if config.host.kind == "local":
        preload()


def check_live(
    config: RunConfig, *schedules: BoundSchedule, machine: Machine | None = None
) -> Fitted[LiveConfig]:
    """Check all that can be checked without starting a process, and choose what depends on the machine.

    Args:
        schedules: that will run, with the same choices for all; none: nothing is trained.
        machine: that will run it; None: this one.

    Raises:
        ConfigError: a section is missing; the model, the data or the reward cannot work.
        CheckpointError: the model is a checkpoint that is damaged.
    """
    config = dated(LiveConfig.of(config))
    check_policy(config, machine)
    for source in config.data.sources:
        check_lengths(
            config.sampling,
            max_context_tokens=context_length(config.model.path),
            max_prompt_tokens=source.max_prompt_tokens,
        )
    tokenizer = load_tokenizer(config.model.path, config.model.template_date)
    check_episodes(config, tokenizer)
    prompts = _open_prompts(config, tokenizer, config.run.seed, "train")
    num_evaluated = config.run.eval_prompts if config.run.eval_every else 1
    held_out = usable_prompts(_open_prompts(config, tokenizer, config.run.seed, "eval"), num_evaluated)
    first = usable_prompts(prompts, CHECKED_ROWS)
    if tag := OPEN_TAG.search(first[0].opened):
        say(f"prompts end with {tag[0]!r}: completions lack it, and rewards get it as completion_prefix")
    check_scorers(config, first)
    check_teachers(config, [prompt.row for prompt in first])
    import_sinks(config.record.sinks)
    check_trackers(config.record.trackers)
    check_placement(config)
    check_host(config.host, engine=config.engine, weights=config.weights)
    key, num_groups = max(map(most_groups, schedules), key=lambda each: each[1], default=("", 0))
    measured = usable_prompts(prompts, max(MEASURED_PROMPTS, min(num_groups, MOST_MEASURED)))
    drawn = "rows to train on, so a row is drawn several times"
    ends = end_of_text_ids(config.model.path).union(config.sampling.stop_token_ids)
    encoders = {source.source_name: PromptEncoder(source, tokenizer) for source in config.data.sources}
    said = (line for p in first for line in (encoders.get(p.source) or encoders[""]).remarks(p.given, ends))
    remarks = [*dict.fromkeys(said)]
    remarks += [*_learning_rate(config), *_repeated_rows(measured[:num_groups], f"schedule.{key}", drawn)]
    remarks += _repeated_rows(held_out, "run.eval_prompts", "held-out rows, and each is evaluated once")
    for remark in remarks:
        say(f"warning: {remark}")
    overlaps = any(trains_while_generating(config, schedule) for schedule in schedules)
    longest = max(len(prompt.ids) for prompt in measured)
    fitted = fitted_to_machine(config, prompt_tokens=longest, overlaps=overlaps, machine=machine)
    return replace(fitted, remarks=[*fitted.remarks, *remarks])


def check_own_trainer(config: LiveConfig) -> None:
    """Check the trainer of a command that trains without engines. Raises a ConfigError."""
    if not trainer_kind(config).is_local:
        problem = "what is trained without engines is trained by the run's own trainer"
        raise ConfigError("trainer.kind", config.trainer.kind, problem, 'write "torch"')
    check_device("trainer.device", config.trainer.device)
    trainer_kind(config).check(config)


def _learning_rate(config: LiveConfig) -> Iterator[str]:
    """A rate at which policies collapse."""
    rate, usual = config.trainer.learning_rate, TrainerSettings.model_fields["learning_rate"].default
    if rate < 100 * usual or not trainer_kind(config).is_local:
        return
    usual *= 10 if config.trainer.lora else 1
    usual *= 1 if ModelShape.read(config.model.path).num_parameters > SMALL_MODEL else 100
    if rate >= 100 * usual:
        often = f"{rate / usual:,.0f} times what models of this size usually have ({usual:g})"
        yield f"trainer.learning_rate = {rate:g}: {often}; if rewards fall or entropy collapses, lower it"


def _repeated_rows(prompts: Sequence[Prompt], key: str, what: str) -> Iterator[str]:
    rows = [prompt.row_number for prompt in prompts if prompt.row_number is not None]
    if len({*rows}) < len(rows):
        yield f"{key} = {len(prompts)}: the data have {len({*rows})} {what}; lower it, or give more rows"


def check_policy(config: PolicyConfig, machine: Machine | None = None) -> None:
    """Check the model, and what generates and trains with it. Arguments and errors as `check_live`."""
    path = config.model.path
    remedy = f"name another model.path, or, if you changed it, remove {path / CHECKSUMS_FILE}"
    verify(path, remedy, is_editable=not (path / ONLY_OF_THE_TRAINER).exists())
    engine_kind(config).check(config)
    trainer_kind(config).check(config)
    if machine is None:
        engine_kind(config).check_installed(config.engine)
    check_devices(config, machine or Machine.read(uses_gpu=uses_gpu(config)))
    sampling, size = config.sampling, read_config(path)["vocab_size"]
    for id in sampling.stop_token_ids:
        if id >= size:
            problem = f"the model's vocabulary has {size} tokens"
            raise ConfigError("sampling.stop_token_ids", id, problem, "correct it, or remove it")
    if not (end_of_text_ids(path) or sampling.stop_token_ids or sampling.stop):
        say(
            f"warning: nothing ends a text: {path} names no eos_token_id, so every completion has "
            "sampling.max_completion_tokens; add it to generation_config.json, or set sampling.stop_token_ids"
        )


def fitted_to_machine(
    config: Policy, *, prompt_tokens: int, overlaps: bool, machine: Machine | None = None
) -> Fitted[Policy]:
    """Choose what a checked config leaves to its machine, where the workers are on it. Raises as `fit`.
    `machine`: as in `check_live`."""
    if config.host.kind != "local" or not trainer_kind(config).is_local:
        return Fitted(config)
    machine = machine or Machine.read(uses_gpu=uses_gpu(config))
    fitted = fit(config, machine, prompt_tokens=prompt_tokens, overlaps=overlaps)
    if fitted.warning:
        say(f"warning: {fitted.warning}")
    return fitted


def check_scorers(config: LiveConfig, prompts: Sequence[Prompt]) -> None:
    """Check what scores the samples of these prompts. Raises a ConfigError."""
    numbers = [each.index if each.row_number is None else each.row_number for each in prompts]
    _check_rewards(config, dict(zip(numbers, (prompt.row for prompt in prompts), strict=True)))
    _check_judges(config, prompts)


def _check_rewards(config: LiveConfig, rows: Mapping[int, Mapping[str, object]]) -> None:
    reward = config.reward
    if warning := unused_rewards(config):
        say(f"warning: {warning}")
    calls_functions = calls_reward_functions(config)
    if calls_functions:
        scorer = Scorer.load(reward, config.data)
        scorer.check_columns({column: None for row in rows.values() for column in row})
        if reward.named():
            say(f"reward: {scorer.describe()}")
    if reward.code:
        kind_of("reward", "code").check(reward, rows, others=calls_functions or bool(reward.judges))


def _check_judges(config: LiveConfig, prompts: Sequence[Prompt]) -> None:
    """Check the judges, and ask those behind endpoints about an empty completion of one of these prompts."""
    reward = config.reward
    sources = [each.source_name for each in config.data.sources if each.source_name]
    alone = not reward.calls_functions and not reward.code
    check_sources("judge", reward.judges, sources, complete=alone)
    for judge in reward.judges:
        scored = [prompt for prompt in prompts if judge.applies_to(prompt.source)]
        if warning := judge_kind(judge).check(judge, reward, config.host.kind, scored):
            say(f"warning: {warning}")


def usable_prompts(prompts: Prompts, num: int) -> list[Prompt]:
    """Return the first prompts of the run's order, without rows that have no usable prompt. Raises a
    ConfigError if there is none; with the reason of the first row."""
    found: list[Prompt] = []
    bad: list[BadRow] = []
    while len(found) < num and len(bad) < MAX_BAD_ROWS:
        try:
            found.append(prompts[len(found) + len(bad)])
        except BadRow as why:
            bad.append(why)
    if not found:
        problem = f"none of the first {len(bad)} rows has a usable prompt; this is the reason of the first"
        raise ConfigError("data", str(bad[0]), problem, "check the data and the model's chat template")
    return found


def first_of_each_source(prompts: Prompts) -> list[Prompt]:
    """Return the first usable prompt of each data source among the first prompts of the run's order."""
    by_source: dict[str, Prompt] = {}
    for prompt in usable_prompts(prompts, CHECKED_ROWS):
        by_source.setdefault(prompt.source, prompt)
    return list(by_source.values())


def training_prompts(config: LiveConfig, seed: int) -> Prompts:
    """Return the training prompts of a live config, in the order that a seed fixes. Raises a ConfigError if
    the settings name no data that can be read."""
    tokenizer = load_tokenizer(config.model.path, config.model.template_date)
    return _open_prompts(config, tokenizer, seed, "train")


def _open_prompts(config: LiveConfig, tokenizer: Tokenizer, seed: int, split: Split) -> Prompts:
    tools = environment_kind(config.environment).tools(config.environment)
    context = context_length(config.model.path)
    prompts = open_prompts(
        config.data, tokenizer, seed=seed, split=split, max_context_tokens=context, tools=tools
    )
    return prompts_of_episodes(config, tokenizer, prompts)


async def rewind(parts: RunComponents, folder: Path, version: int) -> None:
    """Restore the trainer from `folder`, and load its weights into the engines as a version."""
    async with on_devices_of_trainer(parts):
        await parts.trainer.restore(folder)
        weights = await parts.trainer.publish(version)
        await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in parts.engines))


@asynccontextmanager
async def on_devices_of_trainer(parts: RunComponents) -> AsyncIterator[None]:
    """Before a run engines have the devices that the trainer shares. Inside the block it has them."""
    is_shared = parts.sharing.takes_turns
    engines = parts.engines if is_shared else ()
    await asyncio.gather(*(engine.sleep() for engine in engines))
    if is_shared:
        await parts.trainer.wake()
    yield
    if is_shared:
        await parts.trainer.sleep()
    await asyncio.gather(*(engine.wake() for engine in engines))


def advantages_of(config: PolicyConfig) -> ComputeAdvantages:
    """Return what computes the advantages of a scored group."""
    return ComputeAdvantages(config.algorithm, config.sampling)


@asynccontextmanager
async def open_parts(
    config: LiveConfig, folder: Path, *, life: int | None = None
) -> AsyncIterator[RunComponents]:
    """Start the workers of a checked config, score one row, and end the workers with the block.

    Args:
        folder: receives the workers' logs.
        life: number of the run's life; the engines then keep their token counts in the folder.

    Raises:
        ConfigError: a worker cannot do its job, or the reward function is defective.
        WorkerDied: a worker ended.
    """
    tokenizer = load_tokenizer(config.model.path, config.model.template_date)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_workers(config, folder, tokenizer, life=life))
        _check_capabilities(config, opened.engines)
        prompts = _open_prompts(config, tokenizer, config.run.seed, "train")
        anchors = Anchors()
        checked = first_of_each_source(prompts)
        rewards = await _scorers(config, opened.rewards, opened.judges, checked, anchors, tokenizer)
        async with open_episodes(config, tokenizer, opened.reference) as run_episode:
            yield RunComponents(
                engines=opened.engines,
                trainer=opened.trainer,
                rewards=rewards,
                prompts=prompts,
                held_out=_open_prompts(config, tokenizer, config.run.seed, "eval"),
                reference=opened.reference,
                sharing=device_sharing(config),
                anchors=anchors,
                synchronous_rewards=config.reward.synchronous,
                run_episode=run_episode,
                prices=prices_of(config),
            )


@asynccontextmanager
async def open_scorers(config: LiveConfig, folder: Path) -> AsyncIterator[Rewards]:
    """Start what scores the samples of a checked config, and end it with the block. Raises as
    `open_parts`. `folder`: receives the workers' logs."""
    tokenizer = load_tokenizer(config.model.path)
    async with open_reward_workers(config, folder, tokenizer) as (functions, judges):
        yield await _scorers(config, functions, judges, (), Anchors(), tokenizer)


def _check_capabilities(config: RunConfig, engines: Sequence[Engine]) -> None:
    """Raises a ConfigError if the placement or the evaluations need what an engine cannot do."""
    if inexact := [engine.name for engine in engines if not engine.capabilities.exact_versions]:
        problem = f"{', '.join(inexact)} cannot say which weights generated a token"
        effect = "after an update in flight, some tokens may count as one version newer than they are"
        say(f"warning: {problem}: {effect}; update the server")
    probed = "probe_every" in config.weights.model_fields_set and config.weights.probe_every
    mute = next((engine.name for engine in engines if not engine.capabilities.scores), None)
    if probed and mute:
        problem = f"{mute} cannot prove that weights have arrived: it does not score a given sequence"
        remedy = "set it to 0; the embedded engine can, and vLLM with sampling.temperature = 1"
        raise ConfigError("weights.probe_every", config.weights.probe_every, problem, remedy)
    whole = next((engine.name for engine in engines if not engine.capabilities.top_p), None)
    if config.run.eval_top_p is not None and whole:
        problem = f"{whole} takes no top-p of a request's own"
        remedy = "remove it; the embedded engine can, vLLM, SGLang and Tinker"
        raise ConfigError("run.eval_top_p", config.run.eval_top_p, problem, remedy)
    awake = next((engine.name for engine in engines if not engine.capabilities.sleep), None)
    if awake and config.placement.takes_turns:
        problem = f"{awake} cannot give the memory of its devices back"
        remedy = 'add "--enable-sleep-mode" to engine.args of vLLM, or write "disaggregated"'
        raise ConfigError("placement.kind", config.placement.kind, problem, remedy)


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
            if warning := await functions.check_one_row(prompt, understood):
                say(f"warning: {warning}")
    scorers: Rewards = functions or NoFunctions()
    if code:
        others = scorers if functions or config.reward.judges else None
        scorers = await kind_of("reward", "code").open(config.reward, anchors, text, others)
    if judges:
        scorers = WithJudges(scorers, judges, text, drop_timeouts=config.reward.on_timeout == "drop")
    return scorers
