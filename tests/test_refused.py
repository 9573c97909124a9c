"""Configs that are refused before anything starts: refused.txt has what each example is changed to, and the
message. What needs a server, a worker or a damaged folder is tested beside what refuses it."""

import json
import re
from pathlib import Path

import pytest

from helpers.small_run import EXAMPLES
from tailrace.api import load_config
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.placement import check_placement, device_sharing
from tailrace.drivers.assembly.schedule import resolve, with_published_defaults
from tailrace.errors import ConfigError

TABLE = Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines()
ROWS = [row.split(maxsplit=2) for row in TABLE if row.startswith(("quickstart", "tools"))]
MESSAGES = [row.strip() for row in TABLE if row.startswith("    ")]
CHECKS = {
    "loaded": lambda config: config,
    "live": check_live,
    "placed": check_placement,
    "shared": device_sharing,
    "simulated": lambda config: device_sharing(config, config.sim),
    "resolved": resolve,
    "published": with_published_defaults,
}
CONFIGS = {"quickstart": EXAMPLES / "quickstart" / "quickstart.toml", "tools": EXAMPLES / "tools.toml"}


@pytest.mark.parametrize(("row", "message"), list(zip(ROWS, MESSAGES, strict=True)))
def test_a_config_that_cannot_work_is_refused_with_key_value_and_remedy(row: list[str], message: str) -> None:
    example, check, changes = row
    with pytest.raises(ConfigError) as refused:
        CHECKS[check](load_config(CONFIGS[example], json.loads(changes)))
    said = ".*".join(map(re.escape, message.split("...")))
    assert any(re.fullmatch(said, line) for line in str(refused.value).splitlines()), str(refused.value)
