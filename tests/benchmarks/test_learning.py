"""The comparison of what schedules learn: figures by hand, and schedules that the registry takes."""

import json
from pathlib import Path

import pytest

from learning import STUDIES, figures, interval
from tailrace.assembly.schedule import resolve
from tailrace.config import load_config

STEP = {"loss": 0.1, "ess": 0.5, "mismatch_kl": 0.2, "lag/max": 3.0, "lag/mean": 1.5, "versions/mean": 2.0}
STEP |= {"tokens/generated": 10.0, "round/time_s": 2.0, "time/step": 1.0, "tokens/trained": 40}


def written(folder: Path, rewards: list[float]) -> Path:
    rows: list[dict[str, float]] = [
        {**STEP, "reward": reward, "samples/trained": 8, "tail/wasted_tokens/deferred": number}
        | ({"kv/recomputed": 1} if number % 4 == 3 else {})
        for number, reward in enumerate(rewards)
    ]
    lines = map(json.dumps, [*rows, {"eval/accuracy": 0.25}, {"eval/accuracy": 0.75}])
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_the_figures_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    found = figures(written(tmp_path, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.5] * 2))
    rewards = [found.pop(f"reward/{part}") for part in range(1, 9)]
    assert rewards == pytest.approx([0.1, 0.5, 0.9, 0.5] * 2)
    assert [found.pop(f"seconds/{part}") for part in range(1, 9)] == [2.0 * part for part in range(1, 9)]
    others = {"accuracy": 0.75, "ess": 0.5, "kl": 0.2, "lag": 3.0, "lag_mean": 1.5, "versions": 2.0}
    others |= {"accuracy/start": 0.25, "length": 5.0, "spread": 0.0}
    others |= {"recomputed": 0.25, "waste": 120 / 160, "samples": 128, "seconds": 32.0}
    assert found == pytest.approx(others)


def test_a_run_that_is_too_short_for_its_parts_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"2 steps .* raise --samples"):
        figures(written(tmp_path, [0.0, 1.0]))


def test_an_interval_is_that_of_students_t() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4841, abs=1e-4)
    assert interval([1.0]) == 0.0


@pytest.mark.parametrize("name", STUDIES)
def test_each_schedule_of_a_study_is_one_of_the_registry(name: str) -> None:
    study = STUDIES[name]
    for run, schedule in study.schedules.items():
        config = load_config(study.config, study.settings_of(run))
        resolve(config.model_copy(update={"schedule": schedule}))
