"""Rewards with one planted fault each: the audit names it in a sentence. It finds none in those that ship."""

import json
from pathlib import Path

import pytest

from helpers.small_run import EXAMPLES, write_small_run
from tailrace.cli import main

FAULTY = """
import random
import time

def right(completion, answer):
    return float(completion.strip() == answer)

def pays_empty(completion, answer):
    return float(not completion or right(completion, answer))

def pays_half_for_empty(completion, answer):
    return right(completion, answer) if completion else 0.5

def pays_echo(prompt, completion, answer):
    return float(prompt.strip() in completion or right(completion, answer))

def pays_zero(completion, answer):
    return float(completion.strip() in ("0", answer))

def pays_length(completion):
    return len(completion) / 100

def pays_any_number(completion):
    return float(len(completion) < 5 and completion.strip().isdigit())

def pays_a_beginning(completion, answer):
    return float(completion != "" and answer.startswith(completion.strip()))

def pays_by_chance(completion, answer):
    return right(completion, answer) * random.uniform(1, 2)

def raises_on_empty(completion, answer):
    return float(completion.split()[0] == answer)

def hangs(completion, answer):
    if "=" in completion:
        time.sleep(60)
    return right(completion, answer)

def wants_twice(completion, answer):
    return float(completion.strip() == answer + answer)

def never_pays(completion, answer):
    return float(completion.strip() == f"<<{answer}>>")

def pays_in_part(prompt, completion, answer):
    leaks = prompt.strip() in completion
    return max(right(completion, answer), 0.5 * leaks, 0.1 * (len(completion) < 4))

def of_a_code(completion, code):
    return float(completion.strip() == code)

def pays_less(completion, answer):
    return -1.0 if completion.strip() == answer else 0.0
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of the small run, with answers in its data."""
    folder = tmp_path_factory.mktemp("audit")
    path = write_small_run(folder)
    rows = [{"prompt": f"{n} + {2 * n} =\n", "answer": str(3 * n)} for n in range(11, 31)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "rewards.py").write_text(FAULTY)
    return path


def checked(config: Path, function: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The faults that the command finds, and the exit code that belongs to them."""
    function = function if ":" in function else f"{config.parent / 'rewards.py'}:{function}"
    code = main(["check-reward", str(config), "--rows", "2", "--reward.function", function, *words])
    found = [line[10:] for line in capsys.readouterr().out.splitlines() if line.startswith("fault ")]
    assert code == bool(found)
    return found


ROWS = "on 2 of 2 rows (rows 2, 10)"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("pays_empty", f"an empty response gets 1 {ROWS}; the right answer gets 1"),
        ("pays_half_for_empty", f"an empty response gets 0.5 {ROWS}; the right answer gets 1"),
        ("pays_echo", f"the prompt gets 1 {ROWS}; the right answer gets 1"),
        ("pays_zero", f"the constant '0' gets 1 {ROWS}; the right answer gets 1"),
        ("pays_length", f"a long response gets 2 {ROWS}; the right answer gets 0.02"),
        ("pays_any_number", f"another row's answer gets 1 {ROWS}; the right answer gets 1"),
        ("pays_a_beginning", f"the right answer cut off gets 1 {ROWS}; the right answer gets 1"),
        (
            "pays_by_chance",
            "not deterministic: 2 of 14 responses get another reward the second time",
        ),
        (
            "raises_on_empty",
            "an empty response has no reward on rows 2, 10: raised: IndexError: list index",
        ),
        (
            "never_pays",
            f"the right answer gets 0 {ROWS}, no more than a wrong one; if a response needs",
        ),
        (
            "pays_less",
            f"the right answer gets -1 {ROWS}, no more than a wrong one; if a response needs",
        ),
    ],
)
def test_a_planted_fault_is_named_in_a_sentence(
    function: str, sentence: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checked(config, function, capsys)
    assert [each for each in found if each.startswith(sentence)] != [], found
    if function not in ("pays_length", "pays_any_number"):  # which pay for several things
        assert len(found) == 1


def test_a_part_of_the_reward_is_a_warning_with_its_figure_and_a_row_of_the_table(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "2", "--reward.function", f"{config.parent / 'rewards.py'}:pays_in_part"]
    assert main(["check-reward", str(config), *words]) == 0
    out = capsys.readouterr().out
    warned = [line[10:] for line in out.splitlines() if line.startswith("warning ")]
    parts = {"an empty response": 0.1, "the constant '0'": 0.1, "the prompt": 0.5}
    parts |= {"the right answer cut off": 0.1, "another row's answer": 0.1}
    assert sorted(warned) == sorted(
        f"{what} gets {part} {ROWS}; the right answer gets 1" for what, part in parts.items()
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    expected = {"the right answer": 1.0, **parts, "a long response": 0.0}
    assert {what: (float(mean), share, rows) for what, mean, share, rows in cells} == {
        what: (mean, "100%" if mean else "0%", "2") for what, mean in expected.items()
    }
    verdict = "verdict   only the right answer gets the full reward; a part of it gets an empty response, "
    assert f"\n{verdict}" in out


def test_the_column_that_only_the_function_names_has_the_right_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small_run(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "code": str(n), "customer": "me"} for n in range(11, 31)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "rewards.py").write_text(FAULTY)
    words = ["--rows", "2", "--reward.function", f"{tmp_path / 'rewards.py'}:of_a_code"]
    assert main(["check-reward", str(path), *words]) == 0
    out = capsys.readouterr().out
    assert "unknown" not in out and "verdict   only the right answer gets the full reward\n" in out


def test_calls_that_take_too_long_are_named_and_end_the_audit(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(config, "hangs", capsys, "--reward.timeout_s", "0.5") == [
        "the prompt has no reward on rows 2, 10: a call takes longer than its time limit",
        "no more was scored after 3 calls that took too long",
    ]


def test_an_unusual_form_of_right_answers_is_given_with_an_option(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(config, "wants_twice", capsys, "--answer", "{answer}{answer}") == []


@pytest.mark.parametrize("function", ["right", "exact", "near", "exact_match"])
def test_no_fault_is_found_in_right_rewards(
    function: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = {name: f"{EXAMPLES / 'smollm2' / 'rewards.py'}:{name}" for name in ("exact", "near")}
    words = ["--reward.function", function] if function == "exact_match" else []
    assert checked(config, shipped.get(function, function), capsys, *words) == []


def test_the_math_checker_pays_for_an_echo_where_the_prompt_is_a_sum(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """math-verify computes the sum that the response repeats."""
    found = checked(config, "right", capsys, "--reward.function", "math")
    assert found == [f"the prompt gets 1 {ROWS}; the right answer gets 1"]


@pytest.mark.parametrize("example", ["quickstart/quickstart.toml", "tools.toml"])
def test_no_fault_is_found_in_the_rewards_of_the_examples(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-reward", str(EXAMPLES / example), "--rows", "2"]) == 0
    assert "fault" not in capsys.readouterr().out


def test_a_dry_run_warns_of_a_faulty_reward(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--reward.function", f"{config.parent / 'rewards.py'}:pays_empty", "--dry-run"]
    assert main(["train", str(config), "--output-dir", str(config.parent / "out"), *words]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: reward" in line]
    share = "on 4 of 4 rows (rows 2, 3, 10, 12)"
    assert warned == [f"tailrace: warning: reward: an empty response gets 1 {share}; the right answer gets 1"]


def test_what_cannot_be_audited_is_one_message(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-reward", str(config), "--answer", "right"]) == 2
    assert "--answer = 'right': the answer is not in it" in capsys.readouterr().err
    assert main(["check-reward", str(config), "--rows", "0"]) == 2
    judge = '[{ kind = "endpoint", url = "http://127.0.0.1:9", model = "m", template = "{completion}" }]'
    text = config.read_text()
    judged = config.parent / "judged.toml"
    judged.write_text(text.replace("[reward]", f"[reward]\njudges = {judge}").replace("function =", "#"))
    assert main(["check-reward", str(judged)]) == 2
    assert "only judges score, whose answers cost; ask for them with --judges" in capsys.readouterr().err
