"""What a live run refuses before a process is started."""

from pathlib import Path

import pytest

from tailrace.commands.live import check_live
from tailrace.config import load_config
from tailrace.errors import ConfigError


def test_a_live_run_needs_a_model(config_path: Path) -> None:
    text = config_path.read_text()
    model = text[text.index("[model]") : text.index("[data]")]
    config_path.write_text(text.replace(model, ""))
    with pytest.raises(ConfigError, match=r"model = None: this command needs the section"):
        check_live(load_config(config_path))


def test_a_sound_config_passes(config_path: Path) -> None:
    check_live(load_config(config_path))


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "quickstart.toml"


def test_a_reward_function_whose_parameter_is_no_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, anwser):\n    return 0.0\n")
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(ConfigError, match=r"'anwser' is no column .*columns: question, answer, metadata"):
        check_live(load_config(QUICKSTART, {"reward.function": spec}))


def test_a_reward_function_that_takes_columns_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, answer, finish_reason):\n    return 0.0\n")
    check_live(load_config(QUICKSTART, {"reward.function": f"{tmp_path}/mine.py:f"}))
