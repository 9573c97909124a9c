"""What `make real` prints at its end, and the rewards of its sums."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluation(run: Path, round: int, answers: list[tuple[str, str, float]]) -> None:
    folder = run / "samples" / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": prompt, "text": text, "reward": reward} for prompt, text, reward in answers]
    (folder / f"round_{round:06}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    accuracy = sum(reward for *_, reward in answers) / len(answers)
    with (run / "metrics.jsonl").open("a") as metrics:
        print(json.dumps({"round": round, "eval/reward": accuracy}), file=metrics)


def test_the_accuracy_over_rounds_and_answers_before_and_after_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation(tmp_path, 0, [("1 + 1", "3", 0.0), ("2 + 2", "4", 1.0)])
    evaluation(tmp_path, 10, [("1 + 1", "2", 1.0), ("2 + 2", "4", 1.0)])
    script("before_and_after").main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"round   0  0.500 {'█' * 30}", f"round  10  1.000 {'█' * 60}"]
    assert lines[3:6] == ["'1 + 1'", "  before (reward 0) '3'", "  after  (reward 1) '2'"]


def test_a_run_without_an_evaluation_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"set run\.eval_every"):
        script("before_and_after").main(tmp_path)


def test_the_last_number_of_an_answer_counts() -> None:
    rewards = script("rewards")
    assert rewards.exact("20 + 97 = 117", "117") == 1.0
    assert rewards.exact("117 and 3", "117") == rewards.exact("none", "117") == 0.0
    assert rewards.near("so 116", "117") == pytest.approx(1 - 1 / 117)
