"""The Python API: what the command line does, as functions.

Each function may be called where an asyncio loop runs already, for example in a notebook: it then works in a
thread of its own. There an interrupt waits until `evaluate` or `compare` is done.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from signal import SIGINT
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tomli_w

from tailrace import config as configs
from tailrace.config import RunConfig
from tailrace.controller.interruption import Interruption
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.results import ComparisonSummary, EvaluationSummary
from tailrace.drivers.assembly.schedule import BoundSchedule, bind, resolve, with_published_defaults
from tailrace.drivers.data.rows import json_lines
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.record.events import Event
from tailrace.record.summary import FirstLast, RunSummary, Summary
from tailrace.schedules import Schedule

T = TypeVar("T")


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, object] | None = None
) -> RunConfig:
    """Read and check a config. Raises a ConfigError that names all that is wrong.

    Args:
        source: a TOML file, or its sections as a mapping. Paths in it are relative to the file, or to the
            working directory.
        overrides: values by dotted key, for example `{"run.rounds": 5}`, or tables of them. They replace
            those of the source. Another `schedule.name` translates the keys of [schedule] for it.
    """
    if isinstance(source, Mapping):
        return configs.config_in(Path.cwd(), deepcopy(dict(source)), overrides)
    return configs.load_config(Path(source), overrides)


def train(
    config: RunConfig,
    output_dir: str | Path,
    *,
    resume: bool = False,
    schedule: Schedule | None = None,
    reward: Callable[..., Any] | None = None,
    data: Iterable[Mapping[str, Any]] | None = None,
    on: Callable[[Event], None] | None = None,
) -> RunSummary:
    """Train a model, as `tailrace train` does.

    SIGINT, SIGTERM and SIGHUP end the run in order with a checkpoint; so do the interrupt of a notebook and a
    budget that is spent, which returns as the last round does.

    Args:
        config: from `load_config`.
        output_dir: the folder for everything about the run; drivers/assembly/folder.py lists it.
        resume: continue the run in the folder, if one has begun there.
        schedule: an async function of a `Run`, in place of the one that the config names. Its other
            parameters are the keys of [schedule], which are translated for it.
        reward: a reward function, in place of those that the config names, for example one that a notebook
            defines. It is called in other processes, with copies of what it uses, and saved as reward.pkl in
            the output directory, where --resume and `tailrace eval` find it.
        data: rows in place of `data.path`, as dicts or as a `datasets.Dataset`. They are saved as rows.jsonl
            in the output directory. A resumed run needs the same rows. Other keys of [data] hold.
        on: called with each event of the run (tailrace.record.events), such as a row of metrics, a dict. If
            it raises, it is called no more, and the run goes on.

    Returns:
        The totals of the run, as in its summary.json.

    Raises:
        ConfigError: the config cannot work, or the folder holds a run and `resume` is false.
        Interrupted: the run was ended in order before its last round; it can be resumed.
        TailraceError: another error ended the run.

    Example:
        async def one_step_off(run: tailrace.Run, groups_per_step: int) -> None:
            run.declare(staleness=1)
            async for _ in run.rounds():
                run.pool.launch(run.prompts(groups_per_step - len(run.pool)))
                groups = await run.pool.take(groups_per_step)
                run.pool.launch(run.prompts(groups_per_step))
                await run.train(groups)
                await run.publish()

        config = tailrace.load_config("run.toml", {"run.rounds": 5})
        summary = tailrace.train(config, "runs/first", schedule=one_step_off)
    """
    from tailrace.drivers.assembly import running

    interruption = Interruption()

    def work() -> RunSummary:
        folder, rows = Path(output_dir), None if data is None else json_lines(data)
        given = config if rows is None else _with_path(config, RunFolder(folder).rows.resolve())
        named, bound = _named(given, schedule)
        return running.train(
            named,
            folder,
            resume=resume,
            schedule=bound,
            reward=reward,
            rows=rows,
            on=on,
            interruption=interruption,
        )

    return _outside_of_loops(work, lambda: interruption.request(SIGINT))


def simulate(config: RunConfig, *, schedule: Schedule | None = None) -> RunSummary:
    """Run a schedule in virtual time, as `tailrace simulate` does. It needs no model. Raises a ConfigError if
    the schedule or its parameters cannot work.

    Args:
        config: from `load_config`.
        schedule: as in `train`.

    Returns:
        The totals of the run. Times are virtual seconds.
    """

    def work() -> RunSummary:
        from tailrace.drivers.assembly.simulation import run_virtual

        named, bound = _named(config, schedule)
        summary = Summary()
        run_virtual(with_published_defaults(named), bound or resolve(named), recorder_of(None, summary))
        return summary.summary()

    return _outside_of_loops(work)


def evaluate(
    source: RunConfig | str | Path,
    *,
    model: str | Path | None = None,
    checkpoint: str = "newest",
    base: bool = False,
    prompts: int | None = None,
    samples: int | None = None,
    overrides: Mapping[str, object] | None = None,
) -> EvaluationSummary:
    """Score held-out prompts and print the numbers, as `tailrace eval` does. Raises a ConfigError if there is
    no such run or checkpoint, or the config cannot work.

    Args:
        source: a config, a TOML file, or the output directory of a run.
        model: a Hugging Face folder or a run with the weights, in place of a checkpoint or model.path.
        checkpoint: of a run: "newest", "best" (of its evaluations), "base", or a name.
        base: evaluate the base, too.
        prompts: in place of run.eval_prompts.
        samples: of each prompt, in place of run.eval_samples.
        overrides: values by dotted key.
    """
    with ExitStack() as files:
        work = partial(
            _command("drivers.commands.evaluate:run"),
            _path_of(source, files),
            model=Path(model) if model else None,
            checkpoint=checkpoint,
            base=base,
            prompts=prompts,
            samples=samples,
            overrides=overrides or {},
        )
        result: EvaluationSummary = _outside_of_loops(work)
    return result


def compare(
    *sources: RunConfig | str | Path,
    schedules: str | Sequence[str] = (),
    vary: Mapping[str, Sequence[object]] | None = None,
    repeats: int | None = None,
    virtual: bool = False,
    output_dir: str | Path | None = None,
) -> ComparisonSummary:
    """Race schedules or values of settings, or compare finished runs, and print the numbers, as `tailrace
    compare` does. Raises a ConfigError if a candidate cannot work, or a folder holds no run.

    Args:
        sources: one config or TOML file; or the output directories of runs.
        schedules: names, or one text of names with commas, in place of compare.schedules.
        vary: values by dotted key, for example `{"trainer.learning_rate": [1e-6, 1e-5]}`: all combinations.
        repeats: in place of compare.repeats.
        virtual: race in virtual time, as without [model].
        output_dir: for the files of each candidate and compare.json.
    """
    with ExitStack() as files:
        work = partial(
            _command("drivers.commands.compare:compare"),
            *(_path_of(source, files) for source in sources),
            schedules=(schedules if isinstance(schedules, str) else ",".join(schedules)) or None,
            vary=[f"{key}={','.join(map(_text, values))}" for key, values in (vary or {}).items()],
            repeats=None if repeats is None else str(repeats),
            virtual=virtual,
            output_dir=Path(output_dir) if output_dir else None,
            overrides={},
        )
        result: ComparisonSummary = _outside_of_loops(work)
    return result


def sft(config: RunConfig, output_dir: str | Path, *, resume: bool = False) -> FirstLast | None:
    """Fine-tune a model on the responses of [data], as `tailrace sft` does. Signals, and the interrupt of a
    notebook, end it as they end `train`.

    Args:
        config: from `load_config`. [sft] has the steps, [trainer] the learning rate.
        output_dir: for all files of the run. `{"model.path": output_dir}` trains on from its model.
        resume: continue the run in the folder, if one has begun there.

    Returns:
        The first and the last held-out loss, in nats a token; None: `sft.eval_every` is 0.

    Raises:
        ConfigError: the config cannot work, or the folder holds a run and `resume` is false.
        Interrupted: the run was ended in order before its last step; it can be resumed.
    """
    interruption = Interruption()
    tuned = _command("extras.sft.command:fine_tune")
    work = partial(tuned, config, Path(output_dir), resume=resume, interruption=interruption)
    loss: FirstLast | None = _outside_of_loops(work, lambda: interruption.request(SIGINT))
    return loss


def _with_path(config: RunConfig, path: Path) -> RunConfig:
    """The config with rows of a file. Raises a ConfigError if its data are not rows."""
    data = config.data or RowsSettings(path=path)
    if "path" not in type(data).model_fields:
        problem = "data = gives rows, and the config has other data"
        raise ConfigError("data.kind", data.kind, problem, 'write "rows", or remove [data]')
    return config.changed(data=data.changed(path=path, config=None, revision=None))


def _named(config: RunConfig, schedule: Schedule | None) -> tuple[RunConfig, BoundSchedule | None]:
    """A schedule that is given as a function, with its parameters, and the config with its name."""
    if schedule is None:
        return config, None
    function = schedule.func if isinstance(schedule, partial) else schedule
    if not inspect.iscoroutinefunction(function):
        raise ConfigError("schedule", schedule, "it is not an async function", "write `async def`")
    name = f"{function.__module__}:{function.__qualname__}"
    named = configs.with_schedule(config.changed(schedules={}), name, schedule=schedule)
    parameters = {key: value for key, value in named.schedule.items() if key != "name"}
    return named, bind(schedule, parameters, config)


def _command(place: str) -> Callable[..., Any]:
    """A function of a command, by name: this room imports no command."""
    function: Callable[..., Any] = import_function(f"tailrace.{place}", "command")
    return function


def _path_of(source: RunConfig | str | Path, files: ExitStack) -> Path:
    """A path; of a config that of a file, which has what it sets until `files` are closed."""
    if not isinstance(source, RunConfig):
        return Path(source)
    path = Path(files.enter_context(TemporaryDirectory())) / "config.toml"
    tree = source.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    path.write_text(tomli_w.dumps(tree), encoding="utf-8")
    return path


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _outside_of_loops(work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
    """Call a function in a thread without a running asyncio loop.

    Args:
        interrupt: called on KeyboardInterrupt while another thread works; a second one is raised.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="tailrace") as thread:
        result = thread.submit(work)
        try:
            return result.result()
        except KeyboardInterrupt:
            interrupt()
            return result.result()
