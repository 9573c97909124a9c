"""What is refused before anything starts."""

import sys
from pathlib import Path

import pytest

from helpers.chatty_model import chatty_tokenizer
from tailrace.config import load_config
from tailrace.drivers.data.open import open_prompts
from tailrace.errors import ConfigError
from tailrace.extras.verifiers.taskset import TasksetSettings

pytestmark = pytest.mark.verifiers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"taskset": "no_such_taskset"},
            r"environment.taskset = 'no_such_taskset': .*No module named 'no_such_taskset'",
        ),
        (
            {"taskset": "needs_another"},
            r"No module named 'not_installed_anywhere'\); install the package of the taskset, with what",
        ),
        ({"taskset": "json"}, r"environment.taskset = 'json': verifiers refuses the taskset"),
        (
            {"taskset": "reverse_text", "args": {"nun_words": 2}},
            r"environment.args.nun_words = 2: verifiers says",
        ),
        (
            {"taskset": "reverse_text", "verifiers": {"agent": {"max_turns": "x"}}},
            r"environment.verifiers.agent.max_turns = 'x': verifiers says",
        ),
        (
            {"taskset": "reverse_text", "agent": "solver"},
            r"environment.agent = 'solver': .* it has agent; name one",
        ),
        ({"taskset": "alphabet_sort"}, r"data.num_tasks = None: the tasks of alphabet_sort have no end"),
        (
            {"taskset": "faulty", "args": {"image": "debian"}},
            r"its tasks cannot run here .*requires image 'debian'",
        ),
        ({"taskset": "proposer_solver"}, r"environment.verifiers.solver.client = None: .* needs a model"),
    ],
)
def test_a_taskset_that_cannot_be_trained_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_prompts(TasksetSettings.model_validate(settings), chatty_tokenizer(), seed=0, split="train")


def test_a_missing_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(
        ConfigError, match=r"environment.kind = 'verifiers': the package verifiers is not inst"
    ):
        open_prompts(TasksetSettings(taskset="reverse_text"), chatty_tokenizer(), seed=0, split="train")


def test_another_release_of_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.extras.verifiers.taskset.version", lambda name: "0.3.1")
    with pytest.raises(ConfigError, match=r"verifiers 0.3.1 is installed, and 0.4 is needed"):
        open_prompts(TasksetSettings(taskset="reverse_text"), chatty_tokenizer(), seed=0, split="train")


def test_the_data_take_over_what_names_the_taskset(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        run = { rounds = 1, group_size = 2 }
        schedule = { name = "serial" }
        environment = { kind = "verifiers", taskset = "reverse_text", args = { num_words = 4 } }
        data = { max_prompt_tokens = 100 }
        """
    )
    data = load_config(tmp_path / "run.toml").data
    assert data == TasksetSettings(taskset="reverse_text", args={"num_words": 4}, max_prompt_tokens=100)


def test_the_splits_share_no_task() -> None:
    settings = TasksetSettings(taskset="reverse_text")
    train, held_out = (
        open_prompts(settings, chatty_tokenizer(), seed=0, split=split) for split in ("train", "eval")
    )
    texts = [{prompts[index].text for index in range(16)} for prompts in (train, held_out)]
    assert [len(each) for each in texts] == [7, 1] and texts[0].isdisjoint(texts[1])
