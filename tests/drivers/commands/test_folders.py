"""What tailrace did not write, it does not remove or replace."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from helpers.small_run import train_here, wait_for_steps, write_small_run
from helpers.tiny_models import save_tiny_model
from tailrace import ConfigError, load_config, train
from tailrace.cli import main
from tailrace.contracts.mark import MARK
from tailrace.drivers.assembly.folder import WRITTEN, RunFolder, earlier_run

EARLIER = Path(__file__).parent / "earlier_folders"
"""Folders that the release before the marks wrote, by the command; `race` is a live comparison."""
REPOSITORY = Path(__file__).parents[3]
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
FEW = {
    "run.rounds": "1",
    "run.eval_every": "0",
    "schedule.groups_per_round": "2",
    "sim.engines.slots": "8",
    "sft.response_column": "answer",
    "sft.steps": "1",
}
COMMANDS = {
    "train": ("train", "run.toml"),
    "sft": ("sft", "run.toml"),
    "simulate": ("simulate", "run.toml"),
    "compare": ("compare", "run.toml", "--virtual", "--schedules", "serial,dora", "--compare.repeats", "1"),
    "race": ("compare", "run.toml", "--schedules", "serial,dora", "--compare.repeats", "1"),
    "replay": ("train", "run.toml", "--replay", "recorded"),
}
SAID = "this command would replace what tailrace did not write there: "


def digests(folder: Path) -> dict[str, str]:
    """A digest of each file of a tree, by path; "": a folder. Python compiles the module of the reward."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def are_as_before(before: dict[str, str], folder: Path) -> bool:
    return before.items() <= digests(folder).items()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, data, rewards and a base model."""
    folder = tmp_path_factory.mktemp("project")
    save_tiny_model(folder / "model", **TINY, num_key_value_heads=1, head_dim=8, eos_token_id=60)
    config = write_small_run(folder)
    rows = [{"prompt": "AB"[n % 2] * (1 + n % 3), "answer": "BBB"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = config.read_text().splitlines()
    lines = ['path = "model"' if line.endswith('/model"') else line for line in lines]
    config.write_text("\n".join(lines))
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the working directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, folder: str, *words: str) -> int:
    few = [word for key, value in FEW.items() for word in (f"--{key}", value)]
    return main([*COMMANDS[name], "--output-dir", folder, *few, *words])


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(EARLIER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


# -- refused by name ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command in ("train", "sft", "simulate", "replay")
        for name in sorted({*WRITTEN.get(command, WRITTEN["train"])})
    ]
    + [
        (command, name)
        for command, names in {
            "compare": ("compare.json", "serial/config.toml", "dora/events.jsonl"),
            "race": ("compare.json", "logs", "start", "dora/events.jsonl"),
        }.items()
        for name in names
    ],
)
def test_a_name_that_a_command_would_write_is_refused_before_anything_else(
    project: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a file or a folder, with other names beside it."""
    for made in (f"there/{name}/mine", "there/lost+found/file", "there/slurm-1.out"):
        Path(made).parent.mkdir(parents=True, exist_ok=True)
        Path(made).write_text("mine")
    before = digests(project)
    assert run(command, "there") == 2
    err = capsys.readouterr().err
    assert f"{SAID}{Path(name).name};" in err and "loads the tokenizer" not in err
    assert digests(project) == before


@pytest.mark.parametrize("name", ["reward.pkl", "rows.jsonl"])
def test_what_a_script_gives_replaces_no_file_of_the_user(project: Path, name: str) -> None:
    given = {"reward": lambda completion: 1.0} if name == "reward.pkl" else {"data": [{"prompt": "A"}]}
    Path("there").mkdir()
    Path("there", name).write_text("mine")
    with pytest.raises(ConfigError, match=SAID + name):
        train(load_config("run.toml"), "there", **given)
    assert [path.name for path in Path("there").iterdir()] == [name]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_whose_ledger_is_in_memory_owns_no_file_of_its_name(
    project: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is refused for another reason, which is found later."""
    Path("there").mkdir()
    Path("there/ledger.sqlite").write_text("mine")
    assert run(command, "there", "--ledger.kind", "memory", "--model.path", "nowhere") == 2
    assert "model.path = " in capsys.readouterr().err
    assert run(command, "there", "--model.path", "nowhere") == 2
    assert f"{SAID}ledger.sqlite;" in capsys.readouterr().err
    assert [*digests(Path("there"))] == ["ledger.sqlite"]


@pytest.mark.parametrize("command", ["train", "sft", "simulate", "replay"])
def test_the_folder_of_the_config_and_the_model_is_refused(
    project: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").rename("config.toml")
    before = digests(project)
    words = ["config.toml" if word == "run.toml" else word for word in COMMANDS[command]]
    assert main([*words, "--output-dir", ".", "--sft.response_column", "answer"]) == 2
    names = {"simulate": "config.toml", "sft": "config.toml, model"}
    assert f"{SAID}{names.get(command, 'config.toml, model')};" in capsys.readouterr().err
    assert digests(project) == before


def test_quickstart_replaces_no_run_of_another_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    assert main(["quickstart", "--output-dir", str(tmp_path)]) == 2
    assert f"{SAID}model;" in capsys.readouterr().err
    folder = unpacked("train", tmp_path)
    before = digests(folder)
    for _ in range(2):
        assert main(["quickstart", "--output-dir", str(folder), "--run.rounds", "1"]) == 2
        assert "it holds a run of tailrace train; choose another" in capsys.readouterr().err
        assert digests(folder) == before


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (("fit", "RUN", "--output"), '[run]\nrounds = 3\n\n[sim.cluster]\ndevice = "H100"\n'),
        (("view", "RUN", "--output"), "<html><title>mine</title></html>"),
        (("view", "RUN", "--perfetto"), "[1, 2]"),
        (("compare", "RUN", "RUN", "--json"), '{"name": "mine"}'),
        (("simulate", "run.toml", "--json"), '{"name": "mine"}'),
        (("plan", "run.toml", "--output"), "# Mine\n[run]\nrounds = 3\n"),
        (("plan", "run.toml", "--json"), '{"name": "mine"}'),
        (("eval", "RUN", "--json"), '{"name": "mine"}'),
        (("diagnose", "RUN", "--json"), '{"name": "mine"}'),
    ],
)
def test_an_output_file_that_another_program_wrote_is_refused(
    project: Path, words: tuple[str, ...], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked("train", project)
    Path("file").write_text(content)
    assert main([str(folder) if word == "RUN" else word for word in words] + ["file"]) == 2
    assert (
        "= 'file': tailrace did not write the file that is there; choose another" in capsys.readouterr().err
    )
    assert Path("file").read_text() == content


@pytest.mark.parametrize("words", [("fit", "--output"), ("view", "--output"), ("view", "--perfetto")])
def test_an_output_file_of_the_same_command_is_replaced(project: Path, words: tuple[str, str]) -> None:
    folder = unpacked("train", project)
    Path("file").write_text("")
    for _ in range(2):
        assert main([words[0], str(folder), words[1], "file"]) == 0
        assert Path("file").stat().st_size > 100


# -- foreign files beside those of a command ------------------------------------------------------------


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize("place", ["new", "model", "."])
def test_a_simulation_leaves_what_is_there_and_can_be_repeated(
    project: Path, command: str, place: str
) -> None:
    for name in ("logs", "start", "ledger.sqlite", "wandb"):  # which commands that train write
        (project / place / name).mkdir(parents=True)
        (project / place / name / "mine").write_text("mine")
    before = digests(project)
    for _ in range(2):
        assert run(command, place) == 0
        assert are_as_before(before, project)
    name = "summary.json" if command == "simulate" else "compare.json"
    assert (project / place / name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sft", "replay"])
def test_training_leaves_what_is_there(project: Path, command: str) -> None:
    """In the folder of the model and the data, which a cluster has written to."""
    Path("model").rename("base")
    text = Path("run.toml").read_text().replace('path = "model"', 'path = "base"')
    Path("run.toml").write_text(text)
    if command == "replay":
        assert run("train", "recorded", "--ledger.keep_tokens", "true") == 0
    Path("lost+found").mkdir()
    Path("slurm-7.out").write_text("mine")
    Path("reward.pkl").write_text("mine")
    before = digests(project)
    assert run(command, ".") == 0
    assert Path("model/model.safetensors").exists() and are_as_before(before, project)
    assert run(command, ".") == 2
    assert run(command, ".", "--resume") == 0
    assert are_as_before(before, project)


@pytest.mark.slow
def test_a_second_quickstart_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    words = ["--run.rounds", "1", "--run.eval_every", "0", "--schedule.groups_per_round", "2"]
    words += ["--schedule.groups_per_step", "2", "--output-dir", str(tmp_path)]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "race").mkdir()
    for _ in range(2):
        assert main(["quickstart", *words]) == 0
        assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "race").is_dir()
    assert (tmp_path / "metrics.jsonl").read_text().count('"loss"') == 1
    run, before = ["train", str(tmp_path / "config.toml"), "--output-dir", str(tmp_path)], digests(tmp_path)
    assert main(run) == 2 and main([*run, "--resume", "--run.group_size", "2"]) == 2
    assert digests(tmp_path) == before
    assert main([*run, "--resume", "--run.rounds", "2"]) == 0
    before = digests(tmp_path)
    assert [main(["quickstart", *words]) for _ in range(2)] == [2, 2]  # it is a run of `train` now
    assert digests(tmp_path) == before


# -- folders of the release before the marks -------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".tar.gz") for path in EARLIER.iterdir()))
def test_a_folder_of_an_earlier_release_is_known_by_what_it_holds(tmp_path: Path, name: str) -> None:
    """But that of a fine-tuning which was killed before its first checkpoint: nothing says whose it is."""
    command, names = earlier_run(unpacked(name, tmp_path))
    owned = {path.name for path in (tmp_path / name).iterdir()} & {*names}
    there = {path.name for path in (tmp_path / name).iterdir()} - {"weights", "serial", "rolloutpipe"}
    assert owned == (set() if name == "killed_sft" else there)
    written_by = {"race": "compare", "sft": "sft", "compare": "compare", "simulate": "simulate"}
    kind, _, _ = name.partition("-")
    assert command == ("" if name == "killed_sft" else written_by.get(kind, "train"))


@pytest.mark.parametrize(
    ("name", "refusals"),
    [
        ("train", {"train", "sft", "simulate", "compare"}),
        ("replay", {"train", "sft", "simulate", "compare"}),
        ("memory", {"train", "sft", "simulate", "compare"}),
        ("sft", {"train", "sft", "simulate", "compare"}),
        ("killed", {"sft", "simulate", "compare"}),
        ("killed_sft", {"train", "sft", "simulate"}),
        ("simulate", {"train", "sft", "compare"}),
        ("compare", {"train", "sft", "simulate"}),
        ("race", {"train", "sft", "simulate"}),
    ],
)
def test_a_command_replaces_in_an_earlier_folder_no_run_but_its_own(
    project: Path, name: str, refusals: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What trains there is another test."""
    folder = unpacked(name, project)
    (folder / "slurm-1.out").write_text("mine")
    before = digests(project)
    for command in sorted(refusals):
        assert run(command, name) == 2
        err = capsys.readouterr().err
        assert "it holds a run" in err or (name == "killed_sft" and SAID in err)
        assert before == {key: digest for key, digest in digests(project).items() if MARK not in key}
    for command in sorted({"simulate", "compare"} - refusals):
        assert run(command, name) == 0
    assert (folder / "slurm-1.out").read_text() == "mine"


def test_a_fine_tuning_of_an_earlier_release_is_not_resumed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(unpacked("sft", project))
    assert run("sft", "sft", "--resume") == 2
    said = "it has no ledger.sqlite to go on from; begin another with --model.path sft"
    assert said in capsys.readouterr().err and digests(project / "sft") == before


@pytest.mark.slow
def test_a_run_of_an_earlier_release_that_was_killed_at_once_begins_anew(project: Path) -> None:
    folder = unpacked("killed", project)
    assert run("train", "killed", "--resume") == 0
    assert (folder / "model" / "model.safetensors").exists()
    assert json.loads((folder / MARK).read_text())["command"] == "train"


# -- while a run goes on -----------------------------------------------------------------------------------


def test_two_processes_that_begin_in_one_empty_folder_are_one(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RIVAL, str(tmp_path / "new")]
    rivals = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "12"]
    assert [each.stdout and each.stdout.readline() for each in rivals] == ["ready\n"] * 2
    for each in rivals:
        assert each.stdin
        each.stdin.write("\n")
        each.stdin.flush()
    said = [each.stdout and each.stdout.readline() for each in rivals]
    for each in rivals:
        each.communicate("\n", timeout=60)
    assert sorted(map(str, said)) == ["another process is training in it\n", "holds it\n"]
    assert sorted(os.listdir(tmp_path / "new")) == [MARK, "lock"]


RIVAL = """
import sys
from pathlib import Path
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.errors import ConfigError

print("ready", flush=True)
sys.stdin.readline()
try:
    with RunFolder(Path(sys.argv[1])).locked():
        print("holds it", flush=True)
        sys.stdin.readline()
except ConfigError as why:
    print(why.problem, flush=True)
"""


def test_a_folder_is_locked_without_its_file_lock(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        (tmp_path / "lock").unlink()
        words = [sys.executable, "-c", RIVAL, str(tmp_path)]
        rival = subprocess.run(words, input="\n\n", stdout=subprocess.PIPE, text=True, check=True)
    assert rival.stdout == "ready\nanother process is training in it\n"


@pytest.mark.slow
@pytest.mark.parametrize("removed", ["out", "out/samples"])
def test_a_folder_that_is_removed_in_mid_run_is_named(
    tmp_path: Path, removed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, moved = write_small_run(tmp_path), tmp_path / "moved"

    def remove() -> None:
        wait_for_steps(tmp_path / "out", 2)
        (tmp_path / removed).rename(moved)

    assert train_here(config, "--run.rounds", "200", meanwhile=remove) == 1
    err = capsys.readouterr().err
    assert f"tailrace: FolderLost: {tmp_path / 'out'}" in err and "put it back, then --resume" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_ledger_that_is_deleted_in_mid_run_is_told_of_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, ledger = write_small_run(tmp_path), tmp_path / "out" / "ledger.sqlite"

    def delete() -> None:
        wait_for_steps(tmp_path / "out", 1)
        ledger.unlink()

    assert train_here(config, "--run.rounds", "20", meanwhile=delete) == 0
    assert f"warning: {ledger} was deleted meanwhile" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_says_which_of_its_records_are_gone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "out"
    subprocess.run(["cp", "-r", str(trained), str(copy)], check=True)
    (copy / "events.jsonl").unlink()
    words = ["train", str(copy / "config.toml"), "--output-dir", str(copy), "--resume"]
    assert main(words) == 0
    assert f"warning: {copy} lacks events.jsonl of what it has trained" in capsys.readouterr().err


def test_make_removes_no_run(tmp_path: Path) -> None:
    for target in ("quickstart", "real"):
        words = ["make", "--dry-run", "--always-make", target, f"RUNS={tmp_path}"]
        done = subprocess.run(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
        assert "rm -r" not in done.stdout
