"""A run by its address on W&B: its client reads it from a server, or one message says what is missing."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_logs import rows_of, written
from wandb_server import KEY, RUN, serving

from tailrace.cli import main
from tailrace.errors import ConfigError
from tailrace.extras.plan.logs import EXTRAS, WANDB
from tailrace.extras.plan.peers import read_peer

ROWS = [*rows_of("verl sync", 5)]
ADDRESS = Path(WANDB + RUN)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wandb = pytest.importorskip("wandb", reason="pip install 'tailrace[wandb]'")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


def test_a_run_by_its_address_is_read_as_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ROWS) as host:
        monkeypatch.setenv("WANDB_BASE_URL", host)
        assert read_peer(ADDRESS).steps == read_peer(written("verl sync", tmp_path, 5)).steps


@pytest.mark.parametrize(
    ("run", "rows", "key_is_known", "message"),
    [
        (RUN, None, True, "does not show this run, which is private or gone: no history found for run abc;"),
        ("me/proj/gone", ROWS, True, "private or gone: .*gone.*; check the address, log in as somebody"),
        (RUN, ROWS, False, "does not take the key; log in with `wandb login`, or set WANDB_API_KEY, or"),
        (RUN, ROWS[:0], True, "there is no run in it, and no log with the time of steps"),
        ("proj/abc", ROWS, True, "it is no address of a run; name wandb:ENTITY/PROJECT/RUN"),
    ],
)
def test_a_run_that_is_not_shown_is_one_message(
    run: str,
    rows: list[dict[str, float]] | None,
    key_is_known: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(rows, key_is_known=key_is_known) as host:
        monkeypatch.setenv("WANDB_BASE_URL", host)
        assert main(["advise", WANDB + run]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_no_key_and_no_package_name_what_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match=r"there is no key for http.*; log in with `wandb login`"):
        read_peer(ADDRESS)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=re.escape(f"needs the package wandb; {EXTRAS}")):
        read_peer(ADDRESS)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's client tries for 20 s."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 is not reached: .*refused; check the network"):
        read_peer(ADDRESS)
