"""One simulation of the page: a set-up and a schedule in, figures and a picture out, both as JSON.

The worker of the page calls `answered` as WebAssembly, and tests call it in Python. It is the simulator of
`tailrace simulate`, without files: no numpy, no processes, no torch.
"""

import ast
import inspect
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config import config_in, translated_parameters
from tailrace.drivers.assembly.folder import recorder_of
from tailrace.drivers.assembly.schedule import bind, resolve, with_published_defaults
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.errors import ConfigError, TailraceError
from tailrace.extras.view.requests import drawn_request
from tailrace.record.bounds import merged
from tailrace.record.events import Event, Interval, Row, logged
from tailrace.record.figures import rounds_of
from tailrace.record.summary import Summary
from tailrace.record.timeline import Timeline
from tailrace.schedules import SCHEDULES, Schedule

WARM_UP = 1 / 3
"""Share of the rounds whose times no figure counts: schedules that never stop begin with short responses."""
LINES = "<lines>"
"""The name of the reader's lines in a traceback."""


class Question(msgspec.Struct, frozen=True):
    """A set-up and a schedule."""

    config: str
    """The set-up as a TOML file."""
    settings: dict[str, Any]
    """Values by dotted key, which replace those of the file. None takes a key out."""
    schedule: str
    lines: str | None = None
    """Python that is run in place of the schedule's own source."""


class SimulationAnswer(msgspec.Struct, frozen=True):
    """The result of a simulation, as the page draws it."""

    seconds: float
    """Virtual seconds of the whole run."""
    events: int
    """Events of its run log."""
    samples: int
    """Samples of a round of the set-up."""
    figures: dict[str, float]
    """`step_s`: seconds in which as many samples are trained; `engines_wait`: the share of the time in which
    an engine has no request, mean over engines; and those of a trial (record/figures.py)."""
    window: dict[str, Any]
    """The lanes that the timeline of `tailrace view` draws (extras/view/lanes.py)."""


class SimulationProblem(msgspec.Struct, frozen=True):
    """The reason why there is no answer, as the command line says it."""

    problem: str


class _Recorded:
    """Sink: the timeline of a run, and the number of its events."""

    def __init__(self) -> None:
        self.timeline, self.events = Timeline(), 0

    def on(self, event: Event) -> None:
        if line := logged(event):
            self.events += 1
            self.timeline.on(line)

    def close(self) -> None: ...


def answered(question: str) -> str:
    """Simulate a `Question`; return a `SimulationAnswer` or a `SimulationProblem`. All three are JSON."""
    asked = msgspec.json.decode(question, type=Question)
    return msgspec.json.encode(answer(asked)).decode()


def answer(asked: Question) -> SimulationAnswer | SimulationProblem:
    """Simulate a question. Whatever goes wrong is said in one sentence."""
    try:
        return _simulated(asked)
    except ConfigError as why:
        return SimulationProblem(str(why))
    except MemoryError:
        return SimulationProblem("the memory is full: make the set-up smaller")
    except TailraceError as why:
        return SimulationProblem(f"{type(why).__name__}: {why}")
    except SyntaxError as why:
        return SimulationProblem(f"line {why.lineno}: {why.msg}")
    except Exception as why:
        lines = [each.lineno for each in traceback.extract_tb(why.__traceback__) if each.filename == LINES]
        return SimulationProblem(f"line {lines[-1]}: {type(why).__name__}: {why}" if lines else repr(why))


def _simulated(asked: Question) -> SimulationAnswer:
    config = config_in(Path("/"), _tree(asked))
    groups = _groups_of_a_round(config.schedule)
    parameters, _ = translated_parameters(config, asked.schedule)
    config = config.changed(schedule=parameters)
    schedule = resolve(config)
    if asked.lines is not None:
        written = _written(asked.schedule, asked.lines)
        taken = schedule.keywords.keys() & inspect.signature(written).parameters.keys()
        schedule = bind(written, {key: schedule.keywords[key] for key in taken}, config)
    rounds = max(1, round(config.run.rounds * groups / _groups_of_a_round(schedule.keywords)))
    config = with_published_defaults(config.changed(run={"rounds": rounds}))
    summary, recorded = Summary(), _Recorded()
    seconds = run_virtual(config, schedule, recorder_of(None, summary, recorded))
    if not rounds_of(summary.rows):
        raise ConfigError("schedule.name", asked.schedule, "it trained nothing", "choose another")
    figures = _figures(summary, recorded.timeline, groups * config.run.group_size)
    return SimulationAnswer(
        seconds, recorded.events, groups * config.run.group_size, figures, window(recorded.timeline)
    )


def _tree(asked: Question) -> dict[str, Any]:
    """The sections of the config with the settings in them."""
    tree = tomllib.loads(asked.config)
    for key, value in asked.settings.items():
        *sections, name = key.split(".")
        section = tree
        for each in sections:
            section = section.setdefault(each, {})
        section.pop(name, None)
        if value is not None:
            section[name] = value
    return tree


def _groups_of_a_round(parameters: Mapping[str, Any]) -> int:
    steps = parameters.get("groups_per_step", 1) * parameters.get("steps_per_round", 1)
    return int(parameters.get("groups_per_round", steps))


def _written(name: str, lines: str) -> Schedule:
    """The last `async def` of the lines, in the module of the schedule that they replace. Raises what Python
    raises when it reads or runs them."""
    names = [each.name for each in ast.parse(lines, LINES).body if isinstance(each, ast.AsyncFunctionDef)]
    if not names:
        raise ConfigError("lines", lines[:40], "there is no schedule in them", "write `async def`")
    scope = dict(vars(sys.modules[SCHEDULES[name].__module__]))
    exec(compile(lines, LINES, "exec"), scope)
    written: Schedule = scope[names[-1]]
    return written


def _figures(summary: Summary, timeline: Timeline, samples: int) -> Row:
    rounds = len(rounds_of(summary.rows))
    figures = summary.figures(int(WARM_UP * rounds))
    requests = [*timeline.requests, *timeline.open_requests]
    busy = [
        merged((each.start_s, each.end_s) for each in requests if each.engine == engine)
        for engine in timeline.slots
    ]
    busy_s = sum(end_s - start_s for spans in busy for start_s, end_s in spans)
    waiting = 1.0 - busy_s / (len(busy) * timeline.end_s)
    return figures | {"step_s": samples / figures["samples_per_s"], "engines_wait": waiting}


def window(timeline: Timeline) -> dict[str, Any]:
    """The lanes of a whole run, each piece of work by itself."""
    work: Mapping[str, Sequence[Interval]] = {
        "gradients": timeline.passes,
        "step": timeline.steps,
        "publication": timeline.publications,
    }
    pieces = [(each.start_s, each.end_s, cause) for cause, mine in work.items() for each in mine]
    requests = [*timeline.requests, *timeline.open_requests]
    engines = [
        {
            "name": engine,
            "slots": slots,
            "pieces": (),
            "requests": [drawn_request(each) for each in requests if each.engine == engine],
        }
        for engine, slots in sorted(timeline.slots.items(), key=lambda each: (len(each[0]), each[0]))
    ]
    return {
        "from": 0.0,
        "to": timeline.end_s,
        "lanes": [{"name": "trainer", "pieces": sorted(pieces)}, *engines],
        "rounds": [(each.round, each.start_s, each.end_s) for each in timeline.rounds],
        "stragglers": (),
        "states": (),
    }


def source_of(name: str) -> str:
    """The source of a schedule without its docstring."""
    source = inspect.getsource(SCHEDULES[name])
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.AsyncFunctionDef)
    first = function.body[0]
    lines = source.splitlines()
    if ast.get_docstring(function) and first.end_lineno:
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines) + "\n"
