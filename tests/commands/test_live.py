"""What a live run refuses before a process is started."""

from pathlib import Path

import pytest

from tailrace.commands.live import check_live
from tailrace.config import load_config
from tailrace.errors import ConfigError

RACE = Path(__file__).parents[2] / "examples" / "race.toml"


@pytest.mark.parametrize(("setting", "value"), [("host.pin", "true"), ("trainer.threads", "2")])
def test_a_trainer_that_could_not_use_lent_cpus_is_refused(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"host\.lend = True: only a trainer of one thread on a CPU"):
        check_live(load_config(RACE, {"host.lend": "true", setting: value}))
    check_live(load_config(RACE, {"host.lend": "true"}))


@pytest.mark.parametrize(
    ("setting", "value"), [("algorithm.old_policy", "recomputed"), ("algorithm.name", "ppo")]
)
def test_helpers_that_would_lack_a_model_are_refused(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"host\.lend = True: helpers have no critic and no old policy"):
        check_live(load_config(RACE, {"host.lend": "true", setting: value}))
    check_live(load_config(RACE, {setting: value}))
