"""The checks of a live run, before a process is started."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tailrace.config import LiveConfig, Policy, PolicyConfig, RunConfig
from tailrace.contracts.memory import ModelShape
from tailrace.contracts.trainer import TrainerSettings
from tailrace.devices import check_device
from tailrace.drivers.assembly.environments import (
    calls_reward_functions,
    check_episodes,
    run_prompts,
    unused_rewards,
)
from tailrace.drivers.assembly.machine import Fitted, Machine, check_devices, fit, uses_gpu
from tailrace.drivers.assembly.placement import check_placement
from tailrace.drivers.assembly.resumption import dated
from tailrace.drivers.assembly.schedule import BoundSchedule, trains_while_generating
from tailrace.drivers.assembly.simulated import most_groups
from tailrace.drivers.data.encoding import OPEN_TAG, PromptEncoder, load_tokenizer
from tailrace.drivers.data.open import CHECKED_ROWS, check_lengths, usable_prompts
from tailrace.drivers.kinds.base import engine_kind, trainer_kind
from tailrace.drivers.kinds.hooks import ProgramRewards
from tailrace.drivers.kinds.teacher import check_teachers
from tailrace.drivers.kinds.tracker import check_trackers
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.kinds import judge_kind
from tailrace.drivers.reward.settings import check_sources
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, STATE_FOLDER, verify
from tailrace.drivers.workers.hosts import check_host
from tailrace.drivers.workers.process import preload
from tailrace.errors import ConfigError, say
from tailrace.kinds import kind_of
from tailrace.model_folder import context_length, end_of_text_ids, read_config
from tailrace.record.sinks import import_sinks
from tailrace.types import Prompt

MEASURED_PROMPTS = 256
"""Prompts of which the longest stands for all in the estimate of memory."""
MOST_MEASURED = 4096
"""Prompts of a round that are looked at for rows that come twice."""
SMALL_MODEL = 20_000_000
"""Parameters; smaller models are trained with larger learning rates."""


def begin_start(config: RunConfig) -> None:
    """Say that a command starts, and let the modules of its workers be imported beside its checks."""
    say("loads the tokenizer, the data and the reward, and the modules of the workers beside them")
    if not config.host.gives_devices:
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
    check_lengths(config.data, config.sampling, context_length(config.model.path))
    tokenizer = load_tokenizer(config.model.path, config.model.template_date)
    check_episodes(config, tokenizer)
    prompts = run_prompts(config, tokenizer, "train")
    num_evaluated = config.run.eval_prompts if config.run.eval_every else 1
    held_out = usable_prompts(run_prompts(config, tokenizer, "eval"), num_evaluated)
    first = usable_prompts(prompts, CHECKED_ROWS)
    if tag := OPEN_TAG.search(first[0].opened):
        say(f"prompts end with {tag[0]!r}: completions lack it, and rewards get it as completion_prefix")
    check_scorers(config, first)
    check_teachers(config, [prompt.row for prompt in first])
    import_sinks(config.record.sinks)
    check_trackers(config.record.trackers, config.record.tracker_samples)
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
    verify(path, remedy, is_editable=not (path / STATE_FOLDER).exists())
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
    if config.host.gives_devices or not trainer_kind(config).is_local:
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
        programs: ProgramRewards = kind_of("reward", "code", "reward.code")
        programs.check(reward, rows, others=calls_functions or bool(reward.judges))


def _check_judges(config: LiveConfig, prompts: Sequence[Prompt]) -> None:
    """Check the judges, and ask those behind endpoints about an empty completion of one of these prompts."""
    reward = config.reward
    sources = [each.source_name for each in config.data.sources if each.source_name]
    alone = not reward.calls_functions and not reward.code
    check_sources("judge", reward.judges, sources, complete=alone)
    for judge in reward.judges:
        scored = [prompt for prompt in prompts if judge.applies_to(prompt.source)]
        if warning := judge_kind(judge).check(judge, reward, config.host, scored):
            say(f"warning: {warning}")
