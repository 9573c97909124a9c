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
