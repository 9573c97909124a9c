"""Commands that read a run run no code that its config names, and say in one line what is damaged."""

import pickle
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from helpers.small_run import train_here, write_small_run
from tailrace.cli import main
from tailrace.extras.view.run import open_runs

pytest.importorskip("starlette", reason="no page: pip install 'tailrace[view]'")

SIMULATED = """
run = { rounds = 4, group_size = 8 }
schedule = { name = "serial", groups_per_round = 4, groups_per_step = 4 }
"""
READERS = (
    ["view", "RUN", "--output", "OUT/page.html"],
    ["view", "RUN", "--perfetto", "OUT/trace.json"],
    ["compare", "RUN", "OUT/other"],
)
OF_LIVE_RUNS = (
    ["fit", "RUN"],
    ["simulate", "OUT/own.toml", "--like", "RUN"],
    ["inspect", "RUN"],
    ["inspect", "RUN", "--group", "0"],
    ["push", "RUN", "me/it", "--dry-run"],
)
EVERYWHERE = {
    "schedules": {"evil.py:s": {"window": 1}},
    "compare": {"schedules": ["evil.py:s"]},
    "record": {"sinks": ["evil.py:s", "evil.pkl:s"]},
}


def naming(code: str, **environment: object) -> dict[str, Any]:
    return {"schedule": {"name": code}, "reward": {"function": code}, "environment": environment}


PLANTED = {
    "files": naming("evil.py:s", kind="tools", functions=["evil.py:s"]),
    "pickles": naming("evil.pkl:s", kind="python", environment="evil.pkl:s")
    | {"reward": {"functions": [{"function": "evil.pkl:s"}]}},
    "modules": naming("evil:s", kind="agent", function="evil:s"),
    "programs": naming("reward.pkl:s", kind="agent", command=["python", "evil.py"])
    | {"engine": {"kind": "vllm", "python": "evil.py", "env": {"PYTHONSTARTUP": "evil.py"}}},
}
"""Sections of config.toml that name code in each form. One config cannot hold all of them."""
CODE = "from pathlib import Path\nasync def s(run): ...\nPath({!r}).write_text('imported')\n"


class Unpickled:
    """Writes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self.canary, "unpickled")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a simulated run."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "own.toml").write_text(SIMULATED)
    assert main(["simulate", str(folder / "own.toml"), "--output-dir", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def simulated(simulation: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(simulation, tmp_path / "out"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of two rounds."""
    config = write_small_run(tmp_path_factory.mktemp("trained"))
    assert train_here(config, "--run.rounds", "2", "--run.eval_every", "1") == 0
    return config.parent / "out"


def plant(run: Path, sections: dict[str, dict[str, Any]]) -> Path:
    """Name code in the config of a run, where it is looked for. Returns the file that it writes."""
    canary = run.parent / "canary"
    for place in (run, run.parent):
        (place / "evil.py").write_text(CODE.format(str(canary)))
        for name in ("evil.pkl", "reward.pkl"):
            (place / name).write_bytes(pickle.dumps(Unpickled(canary)))
    config = tomllib.loads((run / "config.toml").read_text()) | sections
    config |= {name: config.get(name, {}) | keys for name, keys in EVERYWHERE.items()}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    shutil.copytree(run, run.parent / "other")
    return canary


def words_of(words: Sequence[str], run: Path) -> list[str]:
    return [word.replace("RUN", str(run)).replace("OUT", str(run.parent)) for word in words]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the test is the working directory, and its modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("of", ["simulation", pytest.param("trained", marks=pytest.mark.slow)])
def test_readers_of_a_run_run_none_of_its_code_and_write_none_of_its_names(
    of: str, planted: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(request.getfixturevalue(of), tmp_path / "out"))
    (tmp_path / "own.toml").write_text(SIMULATED)
    canary = plant(run, PLANTED[planted])
    for words in (*READERS, *(OF_LIVE_RUNS if of == "trained" else ())):
        capsys.readouterr()
        assert main(words_of(words, run)) == 0, (words, capsys.readouterr().err)
        assert not canary.exists(), (words, canary.read_text())
    page, trace = ((tmp_path / name).read_text() for name in ("page.html", "trace.json"))
    card = capsys.readouterr().out if of == "trained" else ""
    assert "no prediction for a schedule of your own" in page and '"trainer.learning_rate":' in page
    for written in (page, trace, card):
        assert "evil" not in written and str(tmp_path) not in written


@pytest.mark.usefixtures("importable")
def test_the_server_of_the_page_runs_a_schedule_only_if_it_is_trusted(simulated: Path) -> None:
    from starlette.testclient import TestClient

    from tailrace.extras.view.app import make_app

    canary = plant(simulated, PLANTED["pickles"])
    for trust in (False, True):
        server = TestClient(make_app(open_runs([simulated], trust=trust), "t"), base_url="http://127.0.0.1")
        assert ("note" in server.get("/t/runs/0/faster").json(), canary.exists()) == (not trust, trust)


DEEP = "[" * 100_000 + "]" * 100_000
DAMAGED = {
    "events.jsonl": lambda text: text.replace("engine-0", "engine\\u0000"),
    "summary.json": lambda _: DEEP,
    "config.toml": lambda _: f"a = {DEEP}",
    "config.toml ": lambda _: f"[{'.'.join(['a'] * 5_000)}]\nb = 1\n",
    "metrics.jsonl": lambda _: '{"step": 1, "round": 0, "loss": 0.5, "wall_time": 1.0}\n',
    "samples/round_abc.jsonl": lambda _: "{}\n",
    "samples/round_000003_old.jsonl": lambda _: "{}\n",
    "samples/round_000004.jsonl": lambda _: f'{{"id": "0.0/0", "x": {DEEP}}}\n',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_shown_or_one_line_names_the_file(
    name: str, simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(simulated, tmp_path / "other")
    path = simulated / name.strip()
    path.parent.mkdir(exist_ok=True)
    path.write_text(DAMAGED[name](path.read_text() if path.exists() else ""))
    capsys.readouterr()
    for words in READERS:
        code, said = main(words_of(words, simulated)), capsys.readouterr().err.splitlines()
        assert code == 0 or (code == 2 and len(said) == 1 and str(simulated) in said[0]), (words, said)
    assert '"name":"out"' in (tmp_path / "page.html").read_text()
