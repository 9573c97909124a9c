"""The order of the laps, and the workers that racers share."""

from functools import partial
from pathlib import Path

from small_run import write_small_run

from tailrace.commands.compare import Racer, in_turn
from tailrace.config import load_config
from tailrace.schedules import SCHEDULES

SERIAL = partial(SCHEDULES["serial"], groups_per_round=2, groups_per_step=1)


def racer(folder: Path, **overrides: str) -> Racer:
    config = write_small_run(folder)
    return Racer(
        load_config(config, {key.replace("__", "."): value for key, value in overrides.items()}), SERIAL
    )


def test_workers_depend_on_the_settings_they_are_made_from_and_on_nothing_else(tmp_path: Path) -> None:
    plain = racer(tmp_path)
    assert racer(tmp_path, run__rounds="9", schedule__groups_per_step="1").setup == plain.setup
    assert racer(tmp_path, engine__replicas="3").setup != plain.setup
    assert racer(tmp_path, trainer__threads="2").setup != plain.setup


def test_every_schedule_goes_first_in_turn(tmp_path: Path) -> None:
    racers = dict.fromkeys(("a", "b", "c"), racer(tmp_path))
    assert [in_turn(racers, repeat) for repeat in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_racers_with_the_same_workers_run_side_by_side(tmp_path: Path) -> None:
    one, other = racer(tmp_path), racer(tmp_path, engine__replicas="3")
    racers = {"a": one, "x": other, "b": one, "y": other}
    assert in_turn(racers, 0) == ["a", "b", "x", "y"]
    assert in_turn(racers, 1) == ["x", "y", "b", "a"]
