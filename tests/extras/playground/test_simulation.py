"""Questions of the page and their answers, in Python."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from tailrace.api import load_config, simulate
from tailrace.cli import main
from tailrace.extras.playground.simulation import (
    Question,
    SimulationAnswer,
    SimulationProblem,
    answer,
    answered,
    source_of,
)
from tailrace.schedules import SCHEDULES

TAIL = (files("tailrace.extras.playground") / "tail.toml").read_text(encoding="utf-8")
SMALL: dict[str, Any] = {"run.rounds": 3, "run.group_size": 2}


def asked(schedule: str, lines: str | None = None, **settings: Any) -> SimulationAnswer | SimulationProblem:
    return answer(Question(TAIL, SMALL | settings, schedule, lines))


def problem(schedule: str, lines: str | None = None, **settings: Any) -> str:
    found = asked(schedule, lines, **settings)
    assert isinstance(found, SimulationProblem), found
    return found.problem


def result(schedule: str, lines: str | None = None, **settings: Any) -> SimulationAnswer:
    found = asked(schedule, lines, **settings)
    assert isinstance(found, SimulationAnswer), found
    return found


def test_an_answer_has_the_figures_of_tailrace_simulate_and_every_piece_of_work() -> None:
    found = result("serial")
    tree = tomllib.loads(TAIL)
    tree["schedule"].pop("staleness")  # serial has none: the page, as `tailrace compare`, gives it to others
    summary = simulate(load_config(tree, SMALL))
    assert summary.rounds == 3 and found.samples == 32
    trained = [tokens for lane in found.window["lanes"][1:] for *_, tokens in lane["requests"]]
    assert summary.tokens.trained == sum(trained)
    trainer, *engines = found.window["lanes"]
    assert [lane["name"] for lane in engines] == [f"engine-{number}" for number in range(8)]
    assert sum(len(lane["requests"]) for lane in engines) == 3 * 32
    assert [cause for *_, cause in trainer["pieces"]].count("step") == 3
    assert found.window["rounds"][-1][2] <= found.window["to"] <= found.seconds
    assert found.figures["lag_mean"] == found.figures["waste_share"] == 0.0
    busy_s = [sum(end_s - start_s for start_s, end_s in merged(lane["requests"])) for lane in engines]
    idle = 1 - sum(busy_s) / (8 * found.window["to"])
    assert found.figures["engines_wait"] == pytest.approx(idle, abs=1e-4)


def merged(requests: list[Any]) -> list[list[float]]:
    """The times at which a request is open."""
    spans: list[list[float]] = []
    for start_s, end_s, *_ in sorted(requests):
        if spans and start_s <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end_s)
        else:
            spans.append([start_s, end_s])
    return spans


def test_every_schedule_runs_in_the_first_set_up_and_its_own_lines_change_nothing() -> None:
    for name in SCHEDULES:
        published, own = result(name), result(name, source_of(name))
        assert own == published, name
        assert published.figures["step_s"] == 32 / published.figures["samples_per_s"]


def test_schedules_have_as_many_rounds_as_train_the_same_samples() -> None:
    """Three rounds of 16 groups; conventional has steps of 4 groups, 4 in a round."""
    rounds = {"serial": 3, "conventional": 3, "seer": 2, "pipelinerl": 3}
    assert {name: len(result(name).window["rounds"]) for name in rounds} == rounds


def test_the_source_has_no_docstring_and_the_whole_body() -> None:
    assert source_of("serial").splitlines()[:3] == [
        "async def serial(run: Run, groups_per_round: Count, groups_per_step: Count) -> None:",
        "    require_divisible(groups_per_round, groups_per_step)",
        "    run.declare(staleness=0)",
    ]
    assert all('"""' not in source_of(name) for name in SCHEDULES)


def test_changed_lines_run_in_place_of_the_schedule() -> None:
    lines = source_of("tailrace").replace("staleness, stale=", "min(staleness, 1), stale=")
    assert lines != source_of("tailrace")
    published, changed = result("tailrace"), result("tailrace", lines, **{"schedule.groups_in_flight": 32})
    assert changed.figures["lag_max"] == 1 < published.figures["lag_max"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("async def serial(run):\n    raise ValueError('no')\n", "line 2: ValueError: no"),
        ("async def serial(run)\n    pass\n", "line 1: expected ':'"),
        ("x = 1 / 0\nasync def s(run): ...\n", "line 1: ZeroDivisionError: division by zero"),
        ("x = 1\n", "lines = 'x = 1\\n': there is no schedule in them; write `async def`"),
        ("async def s(run, turns: int): ...\n", "schedule.turns = None: the schedule s needs it, and it is"),
    ],
)
def test_what_is_wrong_with_lines_is_said_in_a_sentence(lines: str, said: str) -> None:
    assert problem("serial", lines).startswith(said)


@pytest.mark.parametrize(
    "settings",
    [
        {"sim.cluster.devices": 2, "sim.cluster.rollout_devices": 1},
        {"sim.cluster.rollout_devices": None},
        {"sim.lengths.sigma": -1.0},
        {"run.group_size": "many"},
    ],
)
def test_a_set_up_that_cannot_run_has_the_message_of_the_command_line(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tomllib.loads(TAIL)
    tree["schedule"].pop("staleness")
    for key, value in settings.items():
        section, name = tree, key.rpartition(".")[2]
        for each in key.split(".")[:-1]:
            section = section[each]
        section.pop(name)
        if value is not None:
            section[name] = value
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(tree))
    assert main(["simulate", str(path)]) == 2
    assert f"tailrace: {problem('serial', **settings)}\n" == capsys.readouterr().err


def test_lines_that_take_all_memory_are_told_to_take_less() -> None:
    assert problem("serial", "async def s(run):\n    raise MemoryError\n").startswith("the memory is full")


def test_question_and_answer_are_json() -> None:
    question = msgspec.json.encode(Question(TAIL, SMALL, "serial")).decode()
    assert msgspec.json.decode(answered(question), type=SimulationAnswer).events == result("serial").events
    question = question.replace('"serial","lines"', '"unknown","lines"')
    assert (
        "there is no such schedule" in msgspec.json.decode(answered(question), type=SimulationProblem).problem
    )
