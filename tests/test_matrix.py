"""Every command that reads the folder of a run, on the folder of every command: it works, or says in one
sentence which command wrote the folder, what it lacks, and what helps."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from helpers.served import TOKEN, served_here
from helpers.small_run import EXAMPLES, write_small_run
from tailrace.cli import main

ROUNDS = ("--run.rounds", "1", "--run.eval_every", "1")
TEACHER = ("--algorithm.distill_coef", "1.0", "--teacher.path", str(EXAMPLES / "quickstart" / "worked"))
RACE = ("compare", "run.toml", "--schedules", "serial,rolloutpipe", "--compare.repeats", "1")
SFT = ("sft", "run.toml", "--sft.steps", "2", "--sft.rows_per_step", "4", "--sft.eval_rows", "4")
MADE = {
    "train": ("train", "run.toml", "--ledger.keep_tokens", "true"),
    "sft": SFT,
    "distilled": ("train", "run.toml", *TEACHER),
    "replay": ("train", "run.toml", "--replay", "train"),
    "compare": RACE,
    "simulate": ("simulate", "run.toml"),
    "race": (*RACE, "--virtual"),
}
"""How each folder was made. That of a comparison has trials in it."""
VIRTUAL = ("simulate", "race", "race/serial")
"""They need no process, so their tests are fast."""
KINDS = ("train", "sft", "distilled", "replay", "compare", "compare/serial", *VIRTUAL)
OF_TRAIN = ("train", "distilled", "replay")
TRAINED = (*OF_TRAIN, "sft")


def made(root: Path, kinds: Iterable[str]) -> Path:
    config = write_small_run(root)
    rows = [{"prompt": f"{n} + {n % 7} =\n", "response": str(n + n % 7)} for n in range(60)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(config.parent)
        for kind in kinds:
            assert main([*MADE[kind], "--output-dir", kind, *ROUNDS]) == 0
    return root


@pytest.fixture(scope="module")
def virtual_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("virtual"), ("simulate", "race"))


@pytest.fixture(scope="module")
def live_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("live"), [kind for kind in MADE if kind not in VIRTUAL])


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a folder in the working directory."""
    name = str(request.param)
    runs: Path = request.getfixturevalue("virtual_runs" if name in VIRTUAL else "live_runs")
    monkeypatch.chdir(runs)
    for left in (runs / "OUT", runs / "COPY"):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return name


def writer(kind: str) -> str:
    """The command that wrote a folder."""
    return MADE[kind.partition("/")[0]][0]


class Command(NamedTuple):
    words: tuple[str, ...]
    """RUN is the folder, COPY a copy of it, OUT a name that is free."""
    works: tuple[str, ...]
    """The folders on which it works."""
    lacks: str
    """What it says of the others; a pattern."""
    shows: Callable[[str, str], object]
    """Whether what was printed or written belongs to the folder of this kind."""


def card_has_its_figure(out: str, kind: str) -> bool:
    figure, tag = ("loss", "sft") if kind == "sft" else ("reward", "reinforcement-learning")
    if kind == "replay":  # it evaluates nothing
        return "| held-out reward | not evaluated |" in out
    return f"- {tag}\n" in out and re.search(rf"\| held-out {figure} \| \d\.\d+", out) is not None


def weights_are_its_own(out: str, kind: str) -> bool:
    return f"/{kind}/checkpoints/round_00000{2 if kind == 'sft' else 1}\n" in out and "4 held-out" in out


def runs_are_equal(out: str, kind: str) -> bool:
    if kind in ("compare", "race"):
        return "serial" in out and "rolloutpipe" in out
    unevaluated = dict.fromkeys(("replay", "compare/serial"), "reward, last round")
    figure = {"sft": "held-out loss", **unevaluated}.get(kind, "held-out reward")
    return f"have the same {figure}: " in out


def page_is_whole(_: str, kind: str) -> bool:
    found = re.search(r'id="data">(.*?)</script>', Path("OUT").read_text(), re.DOTALL)
    runs = [run["figures"] for run in json.loads(found[1])["runs"]] if found else []
    assert {(run["state"]["kind"], len(run["defects"])) for run in runs} == {("finished", 0)}
    return len(runs) == 1 + (kind in ("compare", "race")) and all(run["y"]["loss"][0] for run in runs)


def has_trained(*_: str) -> bool:
    return '"loss"' in Path("OUT/metrics.jsonl").read_text() and Path("OUT/model/config.json").exists()


OF_CHECKPOINTS = "without a (checkpoint|config); name a run of tailrace train or sft"
COMMANDS = {
    "push": Command(
        ("push", "RUN", "me/sums", "--dry-run"),
        TRAINED,
        "without a model; name a run of tailrace train or sft$",
        card_has_its_figure,
    ),
    "inspect": Command(
        ("inspect", "RUN", "--json"),
        OF_TRAIN,
        "without a balance of prompts and tokens; name a run of tailrace train$",
        lambda out, _: json.loads(out)["tokens"]["trained"] > 0,
    ),
    "eval": Command(("eval", "RUN", "--prompts", "4"), TRAINED, OF_CHECKPOINTS, weights_are_its_own),
    "compare": Command(("compare", "RUN", "COPY"), KINDS, "", runs_are_equal),
    "compare with train": Command(
        ("compare", "RUN", "train"),
        ("distilled", "replay", "compare", "compare/serial"),
        "without rewards; name a run of tailrace train or simulate or compare$",
        lambda out, _: "s/step" in out,
    ),
    "view": Command(("view", "RUN", "--output", "OUT"), KINDS, "", page_is_whole),
    "view --perfetto": Command(
        ("view", "RUN", "--perfetto", "OUT"),
        (*OF_TRAIN, "simulate", "compare/serial", "race/serial"),
        "without an events.jsonl; name a run of tailrace train or simulate$",
        lambda *_: len(Path("OUT").read_text()) > 1000,
    ),
    "diagnose": Command(
        ("diagnose", "RUN", "--rounds", "2"),
        TRAINED,
        OF_CHECKPOINTS,
        lambda out, kind: ("it generated nothing" in out) == (kind == "sft") and "the floor of kv" in out,
    ),
    "fit": Command(
        ("fit", "RUN"),
        ("train", "distilled"),
        "without samples; name a run of tailrace train$|a replay generates nothing; name the run that ",
        lambda out, _: "[sim.engines]" in out,
    ),
    "plan --from": Command(
        ("plan", "--from", "RUN"),
        (),
        "without samples; name a run of tailrace train$|a replay generates nothing; name the run that ",
        str.join,
    ),
    "train --model.path": Command(
        ("train", "run.toml", "--output-dir", "OUT", "--model.path", "RUN", *ROUNDS),
        TRAINED,
        "wrote it, and no model in it; name a run of tailrace train or sft that has saved one, or ",
        has_trained,
    ),
    "train --replay": Command(
        ("train", "run.toml", "--output-dir", "OUT", "--replay", "RUN"),
        OF_TRAIN,
        "without samples; name a run of tailrace train$",
        has_trained,
    ),
    "serve": Command(
        ("serve", "RUN"), (), "wrote it, and no model in it; name a run of tailrace train or sft ", str.join
    ),
}
CELLS = [
    pytest.param(command, kind, id=f"{command}-{kind}", marks=() if kind in VIRTUAL else pytest.mark.slow)
    for command in COMMANDS
    for kind in KINDS
    if not (command == "serve" and kind in TRAINED)
    and not (command == "plan --from" and kind in ("train", "distilled"))  # it needs a [sim.cluster] of them
    and not (command == "compare with train" and kind in ("train", *VIRTUAL))
]


@pytest.mark.parametrize(("command", "kind"), CELLS, indirect=["kind"])
def test_a_command_works_on_a_folder_or_says_what_it_lacks(
    command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, works, lacks, shows = COMMANDS[command]
    shutil.copytree(kind, "COPY")
    capsys.readouterr()
    code = main([{"RUN": kind}.get(word, word) for word in words])
    out, err = capsys.readouterr()
    if kind in works:
        assert code == 0 and shows(out, kind), (out, err)
        return
    *_, said = err.splitlines()
    assert code == 2 and re.search(lacks, said) and kind in said, err
    assert f"tailrace {writer(kind)} wrote it" in said or re.search("tailrace wrote it|a replay", said)
    assert not Path("OUT").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED, indirect=True)
def test_the_model_of_a_run_is_served_by_the_folder_of_the_run(kind: str) -> None:
    with served_here(Path(kind)) as url:
        asked = {"model": kind, "prompt": "1 + 1 =\n", "max_tokens": 2}
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{url}/v1/completions", json=asked, headers=bearer, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


WRITERS = {
    "train": ("train", "run.toml", "--resume"),
    "sft": (*SFT, "--resume"),
    "simulate": ("simulate", "run.toml"),
    "compare": (*RACE, "--virtual"),
}


@pytest.mark.parametrize("kind", VIRTUAL, indirect=True)
@pytest.mark.parametrize("command", WRITERS)
def test_a_command_that_writes_replaces_a_folder_of_its_own_only(
    command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kind, "OUT")
    code = main([*WRITERS[command], "--output-dir", "OUT", *ROUNDS])
    assert code == (0 if command == writer(kind) else 2)
    if code:
        assert f"a run of tailrace {writer(kind)}; choose another" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TRAINED, "compare", "compare/serial"], indirect=True)
@pytest.mark.parametrize("command", WRITERS)
def test_a_run_is_resumed_by_the_command_that_began_it(
    command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on for a round or a step more."""
    shutil.copytree(kind, "OUT")
    more = {"sft": ("--sft.steps", "3"), "replay": ROUNDS, "compare": ()}.get(kind, ("--run.rounds", "2"))
    own = writer(kind) == command and kind != "compare/serial"
    words = (*MADE[kind], "--resume") if own and kind in TRAINED else WRITERS[command]
    code = main([*words, "--output-dir", "OUT", *ROUNDS, *more])
    err = capsys.readouterr().err
    assert code == (0 if own or (command, kind) == ("compare", "compare/serial") else 2), err
    if code:
        assert f"'OUT': it holds a run of tailrace {writer(kind)}; choose another" in err
    elif kind in TRAINED:
        rows = map(json.loads, Path("OUT/metrics.jsonl").read_text().splitlines())
        num_steps = {"sft": 3, "replay": 2}.get(kind, 4)
        assert [row["step"] for row in rows if "loss" in row] == [*range(1, num_steps + 1)]
