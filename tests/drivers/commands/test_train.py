"""Live runs: real processes, a real model, files on disk."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.small_run import train_here, trained_prompts, write_small_run
from tailrace.cli import main
from tailrace.config import RunConfig, load_config
from tailrace.contracts.engine import counted_tokens
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.resumption import best_evaluation, opened
from tailrace.drivers.assembly.running import train
from tailrace.drivers.assembly.schedule import with_published_defaults
from tailrace.drivers.commands.evaluate import evaluated_config
from tailrace.drivers.trainer.checksums import is_retired, retire, verify
from tailrace.errors import CheckpointError, ConfigError, DiskFull, FolderLost, LedgerError
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.metrics import read_rows
from tailrace.record.timeline import RunTimelines


def test_the_model_of_a_run_is_a_plain_hugging_face_folder(trained: Path) -> None:
    checkpoint = RunFolder(trained).newest_checkpoint()
    assert checkpoint
    names = {path.name for path in (trained / "model").iterdir()}
    assert {path.name for path in checkpoint.iterdir()} - names == {"trainer"}
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    assert model.config.model_type == "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert tokenizer.decode(tokenizer.encode("7 + 8")) == "7 + 8"


def test_the_best_checkpoint_is_that_of_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    """Round 2 was resumed after its first step: its checkpoint has 4 steps, its evaluation is of 5."""
    folder = RunFolder(tmp_path)
    for round in (0, 1, 2):
        (folder.checkpoints / f"round_{round:06d}").mkdir(parents=True)
    steps = [{"step": step, "round": round, "loss": 0.0} for step, round in enumerate((0, 0, 1, 1, 2, 2), 1)]
    places = {(0, 0): 0.1, (2, 1): 0.3, (5, 2): 0.9, (6, 3): 0.8}
    evaluations = [
        {"step": step, "round": round, "eval/reward": accuracy} for (step, round), accuracy in places.items()
    ]
    assert best_evaluation([*steps, *evaluations], folder) == (0.3, 1)
    assert best_evaluation([*steps, evaluations[0], {**evaluations[2], "step": 4}], folder) == (0.9, 2)


def test_ppo_with_a_kl_trains_and_saves_its_critic(config_path: Path) -> None:
    folder = config_path.parent / "out"
    ppo = {"algorithm.name": "ppo", "algorithm.kl_coef": "0.05", "run.group_size": "1"}
    train(load_config(config_path, ppo | {"run.rounds": "2"}), folder)
    state = next((folder / "checkpoints" / "round_000002" / "trainer").iterdir())
    assert "critic.weight.head.bias" in load_file(state)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["value_loss"] > 0 and row["skipped"] == 0 for row in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[-1]["kl"] != 0
    assert (folder / "logs" / "reference.log").exists()


def test_april_dapo_trains_groups_that_pass_the_filter_and_resumes_the_others(config_path: Path) -> None:
    folder = config_path.parent / "out"
    schedule = '{ name = "april_dapo", groups_per_round = 4, groups_per_draw = 12 }'
    train(load_config(config_path, {"schedule": schedule, "algorithm.name": "dapo"}), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["samples/trained"] for row in steps] == [8, 8, 8]
    assert all(row["frac_reward_zero_std"] == 0 for row in steps)
    assert sum(row.get("groups/filtered/zero_variance", 0) for row in rows) > 0
    assert max(row["deferrals/max"] for row in steps) >= 1
    wasted = {name for row in rows for name in row if name.startswith("tail/wasted_tokens/")}
    assert wasted == {"tail/wasted_tokens/zero_variance"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run of 12 rounds that was killed after its third."""
    path = write_small_run(tmp_path_factory.mktemp("killed"))
    folder = path.parent / "out"
    with subprocess.Popen(command(path), start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not (folder / "checkpoints" / "round_000003").exists():
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert not (folder / "checkpoints" / "round_000012").exists()
    return path


def command(path: Path) -> list[str]:
    words = [sys.executable, "-m", "tailrace.cli", "train", str(path), "--run.rounds", "12"]
    return [*words, "--output-dir", str(path.parent / "out")]


@pytest.fixture
def killed_copy(killed: Path, tmp_path: Path) -> Path:
    """Its folder, to be spoilt."""
    shutil.copytree(killed.parent / "out", tmp_path / "out")
    return tmp_path / "out"


def files_of(folder: Path) -> dict[str, bytes]:
    """All but what SQLite and the workers write when they only look."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".log", ".count") and "ledger.sqlite-" not in path.name
    }


def changed(folder: Path, before: dict[str, bytes]) -> set[str]:
    """Reading a ledger moves its log into the file."""
    after = files_of(folder)
    return {name for name in before.keys() | after.keys() if after.get(name) != before.get(name)}


def killed_config(killed: Path) -> RunConfig:
    return load_config(killed, {"run.rounds": "12"})


def test_a_run_without_its_ledger_cannot_be_resumed(killed: Path, killed_copy: Path) -> None:
    for path in killed_copy.glob("ledger.sqlite*"):
        path.unlink()
    before = files_of(killed_copy)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is missing; put a copy back, or begin a new run"):
        train(killed_config(killed), killed_copy, resume=True)
    assert files_of(killed_copy) == before


def test_a_run_is_not_resumed_with_another_config(killed: Path, killed_copy: Path) -> None:
    other = load_config(killed, {"run.rounds": "12", "run.seed": "7"})
    before = files_of(killed_copy)
    with pytest.raises(ConfigError, match=r"run\.seed = 7: the run was begun with 0; change it back"):
        train(other, killed_copy, resume=True)
    assert files_of(killed_copy).keys() == before.keys()


def test_a_torn_checkpoint_is_named_and_nothing_is_overwritten(killed: Path, killed_copy: Path) -> None:
    newest = newest_marked(killed_copy)
    next((newest / "trainer").iterdir()).write_bytes(b"torn")
    before = files_of(killed_copy)
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*remove .*{newest.name} and resume again"):
        train(killed_config(killed), killed_copy, resume=True)
    assert changed(killed_copy, before) <= {"ledger.sqlite"}
    shutil.rmtree(newest)
    with closing(Store.open(killed_copy / "ledger.sqlite")) as store:
        assert len(read_ledger(store).lives) == 1


def newest_marked(folder: Path) -> Path:
    """The newest committed checkpoint; a later one may have no row yet."""
    with closing(Store.open(folder / "ledger.sqlite")) as store:
        rows = read_ledger(store).checkpoints
    return folder / "checkpoints" / max(rows, key=lambda row: row.round).checkpoint


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer"])
def test_one_bit_in_a_checkpoint_is_refused_with_the_name_of_the_file(
    killed: Path, killed_copy: Path, file: str
) -> None:
    path = newest_marked(killed_copy) / file
    path = next(path.iterdir()) if path.is_dir() else path
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    before = files_of(killed_copy)
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: .*remove .* and resume again"):
        train(killed_config(killed), killed_copy, resume=True)
    assert changed(killed_copy, before) <= {"ledger.sqlite"}
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: .*name another model\.path"):
        check_live(evaluated_config(killed_copy, path.parents[path.parent.name == "trainer"], {}))


def test_an_exported_model_may_be_edited_but_for_its_weights_and_says_so(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    model = tmp_path / "run" / "model"
    config = evaluated_config(tmp_path / "run", model, {})
    check_live(config)
    assert "warning" not in capsys.readouterr().err
    edited = model / "tokenizer.json"
    edited.write_text(edited.read_text() + " ")
    check_live(config)
    assert f"warning: {edited} was changed after a run wrote it" in capsys.readouterr().err
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-9] ^= 4
    (model / "model.safetensors").unlink()  # it is a hard link
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        check_live(config)


def test_the_config_of_a_run_that_was_changed_is_refused_and_an_override_is_not(killed_copy: Path) -> None:
    config = killed_copy / "config.toml"
    text = config.read_text()
    assert "eval_prompts = 4\n" in text
    config.write_text(text.replace("eval_prompts = 4\n", "eval_prompts = 9\n"))
    with pytest.raises(ConfigError, match=r"eval_prompts = 9: .*config\.toml was changed: the run has 4"):
        evaluated_config(killed_copy, None, {})
    config.write_text(text)
    assert evaluated_config(killed_copy, None, {"run.eval_prompts": "9"}).run.eval_prompts == 9


def test_a_checkpoint_of_another_round_in_its_place_is_refused(killed: Path, killed_copy: Path) -> None:
    newest = newest_marked(killed_copy)
    shutil.rmtree(newest)
    shutil.copytree(killed_copy / "checkpoints" / "round_000001", newest)
    with pytest.raises(CheckpointError, match=rf"{newest.name} has 2 optimizer steps, and the ledger says"):
        train(killed_config(killed), killed_copy, resume=True)


def test_a_checkpoint_without_the_optimizer_is_evaluated_and_exported_and_not_resumed_from(
    killed: Path, killed_copy: Path
) -> None:
    newest = newest_marked(killed_copy)
    older = newest.with_name(f"round_{int(newest.name[-6:]) - 1:06d}")
    retire([older], newest)
    assert evaluated_config(killed_copy, None, {}, older.name).model.path == older.resolve()
    model = RunFolder(killed_copy).export(older)
    assert verify(model, "") and not is_retired(model)
    assert AutoModelForCausalLM.from_pretrained(model).config.model_type == "qwen3"
    shutil.rmtree(newest)
    said = rf"{older.name} has a model and no state .* put back {newest.name}, or .* --model.path {older}$"
    with pytest.raises(CheckpointError, match=said):
        train(killed_config(killed), killed_copy, resume=True)


def test_resume_says_from_where_and_which_checkpoint_is_missing(
    killed: Path, killed_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = newest_marked(killed_copy)
    shutil.rmtree(newest)
    with opened(with_published_defaults(killed_config(killed)), RunFolder(killed_copy), resume=True) as (
        _,
        start,
    ):
        assert start.base.checkpoint == f"round_{int(newest.name[-6:]) - 1:06d}"
    told = capsys.readouterr().err
    assert f"checkpoints that the ledger knows are missing: {newest.name}" in told
    assert f"resumed from {start.base.checkpoint}, step {start.base.step} (" in told
    assert int(told.rpartition("(")[2].split()[0]) >= 2, "the two steps of the last round are undone"


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(killed: Path, killed_copy: Path) -> None:
    shutil.rmtree(killed_copy / "checkpoints")
    before = files_of(killed_copy)
    with pytest.raises(
        CheckpointError, match=r"the checkpoints of the run are gone \(round_.*another --output-dir"
    ):
        train(killed_config(killed), killed_copy, resume=True)
    assert changed(killed_copy, before) <= {"ledger.sqlite"}


def test_a_checkpoint_whose_checksums_are_gone_is_refused(killed: Path, killed_copy: Path) -> None:
    newest = newest_marked(killed_copy)
    (newest / "checksums.json").unlink()
    expected = re.escape(f"{newest / 'checksums.json'} is missing; remove {newest} and resume again")
    with pytest.raises(CheckpointError, match=expected):
        train(killed_config(killed), killed_copy, resume=True)


def test_counts_that_are_gone_are_an_error(killed: Path, killed_copy: Path) -> None:
    shutil.rmtree(killed_copy / "counts")
    with pytest.raises(
        LedgerError, match="tokens and the engines counted 0: the counts beside it are missing"
    ):
        train(killed_config(killed), killed_copy, resume=True)


def test_a_run_killed_with_sigkill_resumes_and_trains_no_group_twice(killed: Path) -> None:
    """With a changed learning rate, which is allowed. The last test on this run: it ends it."""
    folder = killed.parent / "out"
    words = ("--run.rounds", "12", "--resume", "--trainer.learning_rate", "2e-4")
    assert train_here(killed, *words) == 0
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(48)}
    assert json.loads((folder / "summary.json").read_text())["groups"]["trained"] == 48
    timelines = RunTimelines(folder / "events.jsonl")
    timelines.update()
    first, second = timelines.all
    assert (first.life, second.life) == (1, 2) and second.is_closed and not first.is_closed
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert second.start_s == first.end_s and second.steps[-1].number == steps
    with closing(Store.open(folder / "ledger.sqlite")) as store:
        books = read_ledger(store)
    assert set(books.groups) == set(range(48)) and len(books.lives) == 2
    totals = totals_of(books)
    assert totals.groups == {"trained": 48} and set(totals.wasted_tokens) <= {"crash", "interrupted"}
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(folder / "counts")


def test_inspect_shows_the_balance_and_the_life_of_a_group(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(killed.parent / "out")
    assert main(["inspect", folder, "--json"]) == 0
    balance = json.loads(capsys.readouterr().out)
    prompts, tokens = balance["prompts"], balance["tokens"]
    assert prompts["drawn"] == sum(prompts[key] for key in ("trained", "filtered", "dropped", "living")) > 11
    parts = [tokens[key] for key in ("trained", "held", "evaluated", "unwritten", "generated")]
    assert sum(parts[:-1]) + sum(tokens["wasted"].values()) == parts[-1] > 0
    assert balance["lives"][0] == {
        "life": 1, "parent": 0, "round": 0, "version": 0, "step": 0, "crash_tokens": 0,
        "samples_undone": balance["lives"][0]["samples_undone"],
    }  # fmt: skip
    assert main(["inspect", folder, "--group", "0", "--json"]) == 0
    group = json.loads(capsys.readouterr().out)
    assert (group["prompt"], group["round"], group["fate"]) == (0, 0, "trained")
    assert [sample["id"] for sample in group["samples"]] == ["0.0/0", "0.0/1"]
    assert group["samples"][0]["steps"][-1].endswith("in life 1")
    assert main(["inspect", folder]) == main(["inspect", folder, "--group", "0"]) == 0
    shown = capsys.readouterr().out
    assert "drawn, generated" in shown and "prompt 0: drawn in round 1 of life 1" in shown


def test_inspect_says_what_it_cannot_find(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(killed.parent / "nowhere")]) == 2
    assert main(["inspect", str(killed.parent / "out"), "--group", "9999"]) == 2
    assert "--group = 9999: the ledger has no such group; choose from 0 to" in capsys.readouterr().err


def test_the_directory_of_a_run_that_trained_is_refused_without_resume(config_path: Path) -> None:
    folder = config_path.parent / "out"
    with RunFolder(folder).locked():
        (folder / "metrics.jsonl").write_text('{"step": 1, "round": 0, "loss": 0.5}\n')
    with pytest.raises(ConfigError, match="it holds a run already; add --resume, or choose another"):
        train(load_config(config_path), folder)


def test_a_run_that_has_ended_is_resumed_without_workers_and_stays_as_it_is(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = tmp_path / "out", trained.parent / "run.toml"
    shutil.copytree(trained, folder)  # copies the times of files
    before = files_of(folder)
    words = ["train", str(config), "--output-dir", str(folder), "--resume", "--run.rounds", "1"]
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "tailrace: the run has ended after round 1; raise run.rounds to go on" in err
    assert "the workers are ready" not in err
    assert changed(folder, before) <= {"ledger.sqlite", "lock"}


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_run_left_that_never_began_blocks_no_other(config_path: Path, resume: bool) -> None:
    """A run that fails in its start leaves a config, a ledger and an evaluation of the model as it was."""
    config, folder = load_config(config_path), RunFolder(config_path.parent / "out")
    with folder.locked(), opened(config, folder, resume=False):
        (folder.counts).mkdir()
        folder.metrics.write_text('{"step": 0, "round": 0, "eval/reward": 0.5}\n')
        (folder.checkpoints / "round_000000").mkdir(parents=True)
        before = folder.config.read_text()
    other = load_config(config_path, {"run.seed": "7"})
    (folder.checkpoints / "round_000000").rmdir()
    with opened(other, folder, resume=resume) as (store, start):
        assert start.life == 1 and store is not None
        assert folder.config.read_text() != before
        assert not folder.metrics.exists() and not folder.counts.exists()


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_directory_in_which_another_process_trains_is_refused(
    config_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Until that process ends, be it by SIGKILL."""
    folder = config_path.parent / "out"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "holds it\n"
        before = files_of(folder)
        assert main(["train", str(config_path), "--output-dir", str(folder), *words]) == 2
        refusal = f"--output-dir = '{folder}': another process is training in it; let that one end, or choose"
        assert refusal in capsys.readouterr().err
        assert files_of(folder) == before and before.keys() == {".tailrace", "lock"}
        other.kill()
    with RunFolder(folder).locked():
        assert files_of(folder).keys() == {".tailrace", "lock"}


HOLDER = """
import sys
from pathlib import Path
from tailrace.drivers.assembly.folder import RunFolder

with RunFolder(Path(sys.argv[1])).locked():
    print("holds it", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match=r"No space left on device; make room on the disk, then --resume"),
        RunFolder(tmp_path).shortage_explained(),
    ):
        Path("/dev/full").write_bytes(b"metrics")


def test_a_limit_of_file_sizes_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    why = rf"^{tmp_path}/metrics: File too large; raise ulimit -f, then --resume$"
    with pytest.raises(DiskFull, match=why), RunFolder(tmp_path).shortage_explained():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            (tmp_path / "metrics").write_bytes(bytes(1000))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(tmp_path / "metrics")) from None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EROFS, "mount it for writing"), (errno.ENOENT, "put it back")]
)
def test_a_folder_that_is_gone_or_read_only_is_one_line_with_its_remedy(
    tmp_path: Path, number: int, remedy: str
) -> None:
    why = rf"^{tmp_path}/samples: {os.strerror(number)}; {remedy}, then --resume$"
    with pytest.raises(FolderLost, match=why), RunFolder(tmp_path).shortage_explained():
        raise OSError(number, os.strerror(number), str(tmp_path / "samples"))


def test_too_few_file_descriptors_are_one_line_with_their_remedy(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = r"^ulimit -n = \d+: the run needs more file descriptors .* raise it, for example to 1024$"
    with pytest.raises(ConfigError, match=why), RunFolder(tmp_path).shortage_explained():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            socket.socketpair()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_rewards_that_raise_hang_or_return_nonsense_are_counted_and_the_run_goes_on(
    config_path: Path,
) -> None:
    folder = config_path.parent / "out"
    rewards = f"{config_path.parent / 'rewards.py'}:unreliable"
    overrides = {
        "reward.function": rewards,
        "reward.timeout_s": "0.5",
        "run.rounds": "2",
        "run.eval_every": "0",
    }
    train(load_config(config_path, overrides), folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["groups"]["trained"] == 8
    reasons = summary["groups"]["reasons"]
    assert summary["groups"]["dropped"] == sum(reasons.values()) > 0
    for reason in reasons:
        assert reason in {
            "dropped/reward_raised",
            "dropped/reward_timeout",
            "dropped/reward_nan",
            "dropped/reward_not_a_number",
        }


def test_a_model_folder_that_is_missing_is_an_error_before_anything_starts(config_path: Path) -> None:
    config = load_config(config_path, {"model.path": "/nowhere"})
    with pytest.raises(ConfigError, match=r"model\.path = '/nowhere'"):
        train(config, config_path.parent / "out")
    assert not (config_path.parent / "out").exists()


STOPS = """
import os, signal

class Stopping:
    def __init__(self, step):
        self.step = step

    def on(self, event):
        if isinstance(event, dict) and "loss" in event and event["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self):
        pass

def after_two(folder):
    return Stopping(2)

def after_one(folder):
    return Stopping(1)
"""


@pytest.mark.parametrize("stop", ["after_two", "after_one"])
def test_rounds_keep_their_numbers_when_a_run_is_resumed_within_one(stop: str, config_path: Path) -> None:
    """A round has two steps. Steps and evaluations have the rounds of a run that was not interrupted."""
    (config_path.parent / "stops.py").write_text(STOPS)
    words = ["--run.checkpoint_every", "0", "--run.eval_every", "1"]
    assert (
        train_here(config_path, *words, "--record.sinks", f'["{config_path.parent}/stops.py:{stop}"]') == 130
    )
    assert train_here(config_path, *words, "--resume") == 0
    folder = RunFolder(config_path.parent / "out")
    rows = read_rows(folder.metrics)
    steps = [(int(row["step"]), int(row["round"])) for row in rows if "loss" in row]
    assert steps == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    evaluated = [(int(row["round"]), int(row["step"])) for row in rows if "eval/reward" in row]
    assert evaluated == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert len(list((folder.samples / "eval").iterdir())) == 4


def test_settings_that_a_person_should_look_at_are_named_before_anything_starts(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are 60, some for the evaluation, of which 49 are different."""
    words = ["train", str(config_path), "--dry-run", "--output-dir", str(config_path.parent / "out")]
    assert main(words) == 0
    digits = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert {line.partition(" gets ")[0] for line in digits} == {
        f"tailrace: warning: reward: {what}" for what in ("the prompt", "the constant '0'", "a long response")
    }
    assert main([*words, "--schedule.groups_per_round", "70", "--trainer.learning_rate", "0.05"]) == 0
    rate, rows, *others = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert others == digits
    usual = "500 times what models of this size usually have (0.0001); if rewards fall or entropy collapses,"
    assert rate == f"tailrace: warning: trainer.learning_rate = 0.05: {usual} lower it"
    assert rows.startswith("tailrace: warning: schedule.groups_per_round = 70: the data have ")
    assert rows.endswith("so a row is drawn several times; lower it, or give more rows")
    assert main([*words, "--run.eval_prompts", "128"]) == 0
    held_out, *others = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert others == digits
    few = "the data have 4 held-out rows, and each is evaluated once; lower it, or give more rows"
    assert held_out == f"tailrace: warning: run.eval_prompts = 128: {few}"


def test_a_run_stops_when_evaluations_gain_no_more_and_names_its_best_checkpoint(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate of next to nothing no evaluation is better than the first one."""
    words = ["--run.eval_every", "1", "--run.stop_after_evaluations", "2", "--run.rounds", "9"]
    assert train_here(config_path, *words, "--trainer.learning_rate", "1e-30") == 0
    folder, captured = RunFolder(config_path.parent / "out"), capsys.readouterr()
    rows = [row for row in read_rows(folder.metrics) if "eval/reward" in row]
    assert [int(row["round"]) for row in rows] == [0, 1, 2]
    newest = folder.newest_checkpoint()
    gain = f"the last 2 evaluations are no better than {rows[0]['eval/reward']:.3f}"
    said = f"tailrace: {gain}; saved {newest}; raise run.stop_after_evaluations, then --resume"
    assert said in captured.err.splitlines()
    (best,) = (line for line in captured.out.splitlines() if line.startswith("best"))
    assert best.startswith(
        f"best      checkpoints/round_000000, held-out reward {rows[0]['eval/reward']:.3f}  ("
    )


def test_a_run_goes_on_from_the_model_of_another_run(
    trained: Path, config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(config_path), "--dry-run", "--output-dir", str(config_path.parent / "out")]
    assert main([*words, "--model.path", str(trained)]) == 0
    assert f'path = "{trained / "model"}"' in capsys.readouterr().out
    unfinished = config_path.parent / "unfinished"
    unfinished.mkdir()
    shutil.copy(trained / "config.toml", unfinished)
    assert main([*words, "--model.path", str(unfinished)]) == 2
    said = "it has a config.toml, and no model in it; name a run of tailrace train or sft that has saved one"
    assert said in capsys.readouterr().err


def test_a_run_with_lora_leaves_its_adapter_in_the_folder_of_the_merged_model(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trainer.lora.rank", "2", "--run.rounds", "1", "--record.print_samples_every", "2"]
    assert train_here(config_path, *words) == 0
    folder, out = RunFolder(config_path.parent / "out"), capsys.readouterr().out
    assert {each.name for each in folder.adapter.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert f"adapter   {folder.adapter}" in out.splitlines()
    assert out.count("Sample | Reward") == 1, "a round has two steps"
    AutoModelForCausalLM.from_pretrained(folder.model)
