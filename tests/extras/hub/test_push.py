"""`tailrace push` against a server with the hub's routes: real sockets, the real huggingface_hub."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer, hub_server
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import disable_progress_bars

from helpers.small_run import train_here, write_small_run
from tailrace import __version__
from tailrace.cli import main
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.extras.hub.card import card_of
from tailrace.model_folder import model_name

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of httpx
Push = Callable[..., tuple[int, str, str]]
"""The exit code, and what was printed on both streams."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of one round, which was evaluated."""
    config = write_small_run(tmp_path_factory.mktemp("pushed"))
    assert train_here(config, "--run.rounds", "1", "--run.eval_every", "1") == 0
    return config.parent / "out"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


def push(run: Path, endpoint: str, *words: str, token: str = TOKEN) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, because huggingface_hub reads its environment when it is imported."""
    mine = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HOME": str(run.parent / "hf")}
    mine |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "tailrace.cli", "push", str(run), *(words or ("me/sums",))]
    return subprocess.run(command, env=os.environ | mine, capture_output=True, text=True, timeout=120)


@pytest.fixture
def push_here(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Push:
    """In this process, with what huggingface_hub has read of its environment."""
    disable_progress_bars()

    def push_here(endpoint: str, *words: str, token: str = TOKEN, folder: Path = run) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run.parent / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", token)
        code = main(["push", str(folder), *(words or ("me/sums",))])
        return code, *capsys.readouterr()

    return push_here


def test_a_model_and_its_card_come_to_the_hub_in_one_commit(run: Path, hub: HubServer) -> None:
    done = push(run, hub.url, "me/sums", "--private")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"pushed    {hub.url}/me/sums/commit/{1:040x}\n"
    assert (hub.commits, hub.private) == (1, {"me/sums"})
    files = hub.repos["me/sums"]
    local = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    del local["checksums.json"]
    assert {name: content for name, content in files.items() if name != "README.md"} == local
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers" and "grpo" in card.data.tags
    assert card.data.eval_results and card.data.eval_results[0].metric_type == "reward"
    rows = dict(re.findall(r"^\| (.+?) \| (.*) \|$", card.text, re.MULTILINE))
    assert rows["base model"] == "model" and rows["schedule"] == "rolloutpipe"
    assert rows["data"] == "rows: rows.jsonl"
    assert (rows["optimizer steps"], rows["trained samples"]) == ("2", "8")
    assert rows["tailrace"] == __version__
    assert "(4 prompts, greedy, at step 2)" in rows["held-out reward"]
    tokens = {key: int(n.replace(",", "")) for key, n in rows.items() if key.startswith("tokens ")}
    assert tokens.pop("tokens generated") == sum(tokens.values()) > 0
    assert 'name = "rolloutpipe"' in card.text and str(run.parent) not in card.text


def test_pushing_again_changes_the_same_repository(hub: HubServer, push_here: Push) -> None:
    assert [push_here(hub.url)[0] for _ in range(2)] == [0, 0]
    assert (hub.commits, len(hub.objects), set(hub.repos)) == (2, 1, {"me/sums"})


def test_the_card_is_shown_without_a_hub(push_here: Push) -> None:
    code, out, _ = push_here("http://127.0.0.1:9", "me/sums", "--dry-run", token="")
    assert code == 0 and out.startswith("---\n") and "# sums\n" in out


@pytest.mark.parametrize(
    ("refuses", "token", "code", "problem"),
    [
        (
            None,
            "",
            2,
            "REPO = 'me/sums': the hub takes no model without a token, and there is none; set HF_TOKEN",
        ),
        (None, "hf_old", 1, r"me/sums: the hub refuses it \(401: .*\); make another token"),
        (
            ("/create", 403),
            TOKEN,
            1,
            r"refuses it \(403: .*You may not.*\); use a token that may write",
        ),
        (
            ("/commit/", 403),
            TOKEN,
            1,
            r"refuses it \(403: .*You may not.*\); use a token that may write",
        ),
        (("/lfs/", 400), TOKEN, 1, r"refuses it \(400: .*You may not do this.*\); push again later"),
    ],
    ids=["no token", "wrong token", "repository", "commit", "weights"],
)
def test_a_hub_that_refuses_is_one_message(
    hub: HubServer, push_here: Push, refuses: tuple[str, int] | None, token: str, code: int, problem: str
) -> None:
    hub.refuses = refuses
    ended, out, err = push_here(hub.url, token=token)
    assert ended == code and out == ""
    (line,) = err.splitlines()
    assert re.search(problem, line)
    assert hub.repos.get("me/sums", {}) == {}


def test_a_hub_that_cannot_be_reached_is_one_message(push_here: Push) -> None:
    code, _, err = push_here("http://127.0.0.1:9")
    (line,) = err.splitlines()
    assert code == 1
    assert "me/sums: http://127.0.0.1:9 cannot be reached (" in line and "check the network" in line


@pytest.mark.parametrize(
    ("missing", "repo", "problem"),
    [
        ("model", "me/sums", "it has no model yet; train until its first checkpoint"),
        ("summary.json", "me/sums", "the run has not ended"),
        ("steps", "me/sums", "summary.json cannot be read"),
        ("config.toml", "me/sums", "its config.toml is missing; put it back"),
        ("", "sums", "this names no repository of the hub; write OWNER/NAME"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_hub_is_asked(
    run: Path, tmp_path: Path, missing: str, repo: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "out")
    if missing == "model":
        shutil.rmtree(tmp_path / "out" / missing)
    elif missing == "steps":
        (tmp_path / "out" / "summary.json").write_text("[" * 100_000 + "]" * 100_000)
    elif missing:
        (tmp_path / "out" / missing).unlink()
    assert main(["push", str(tmp_path / "out"), repo]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_a_fine_tuning_of_a_release_that_wrote_no_summary_has_a_card(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "drivers/commands/earlier_folders/sft.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    card = str(card_of(RunFolder(tmp_path / "sft"), "a/b"))
    assert all(row in card for row in ("| optimizer steps | 1 |", "| tokens trained | 96 |", "loss | 4.168"))


def test_a_base_model_of_the_hub_has_its_id() -> None:
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c0ffee"
    assert [model_name(path) for path in (cached, "Qwen/Qwen3-0.6B")] == ["Qwen/Qwen3-0.6B"] * 2
    assert model_name("/home/me/q") == model_name(Path("/not/here/q")) == "q"


def test_an_adapter_of_an_earlier_version_names_its_base_without_a_path(
    run: Path, tmp_path: Path, hub: HubServer, push_here: Push
) -> None:
    shutil.copytree(run, tmp_path / "out")
    (adapter := tmp_path / "out" / "model" / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/q", "r": 2}')
    assert push_here(hub.url, folder=tmp_path / "out")[0] == 0
    files = hub.repos["me/sums"]
    assert files["adapter/adapter_config.json"] == b'{"base_model_name_or_path": "q", "r": 2}'


def test_a_card_has_the_interval_of_the_rewards_that_the_run_recorded(run: Path) -> None:
    """The mean of four prompts is 0.5, of which Wilson's interval of a share would be 0.150 to 0.850."""
    path = run / "samples" / "eval" / "round_000001.jsonl"
    told = path.read_text()
    try:
        lines = [json.loads(line) for line in told.splitlines()]
        rewards = zip(lines, (0.4, 0.5, 0.5, 0.6), strict=True)
        path.write_text("".join(json.dumps(line | {"reward": reward}) + "\n" for line, reward in rewards))
        shown = "95% interval 0.370 to 0.630 (4 prompts, greedy, at step 2)"
        assert shown in str(card_of(RunFolder(run), "a/b"))
        path.write_text(lines[0]["id"])
        assert "held-out reward" in (card := str(card_of(RunFolder(run), "a/b"))) and "interval" not in card
    finally:
        path.write_text(told)
