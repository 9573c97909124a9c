"""Runs on a Ray cluster of this machine, whose nodes are killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from helpers.small_run import EXAMPLES, num_steps, wait_for_steps, write_small_run
from tailrace.contracts.engine import counted_tokens
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


class Cluster:
    """The process of ray_cluster.py."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = self._said()

    def add(self, name: str, *resources: str) -> None:
        self._change("add", name, *resources)

    def kill(self, name: str) -> None:
        self._change("kill", name)

    def _change(self, *words: str) -> None:
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)
        while self._said() != "done":
            pass

    def _said(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the cluster has ended"
        return line.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes: the head can have an engine and the rewards, and "trainer" the trainer."""
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), "engine_node", "reward_node"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        cluster = Cluster(process)
        cluster.add("trainer", "trainer_node")
        yield cluster
        assert process.stdin
        process.stdin.close()


def train_command(config: Path, folder: Path, address: str, *words: str) -> list[str]:
    command = [sys.executable, "-m", "tailrace.cli", "train", str(config), "--output-dir", str(folder)]
    host = ["--host.kind", "ray", "--host.address", address, "--weights.transport", "process_group"]
    return [*command, *host, *words]


def refusal(*words: str) -> str:
    """What a run that cannot start says, after what it has understood."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    *before, said = done.stderr.splitlines()
    assert any(line.startswith("tailrace: reward: ") for line in before)
    return said


def test_an_engine_that_no_node_can_hold_is_named_with_what_the_cluster_has(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ["--engine.replicas", "2", "--host.resources.engine", "{ CPU = 64, rare = 1 }"]
    config = write_small_run(tmp_path)
    said = refusal(*train_command(config, tmp_path / "out", cluster.address, *words))
    assert said.startswith(
        "tailrace: host.resources.engine = {'CPU': 64.0, 'rare': 1.0}: 2 x CPU 64, rare 1 for"
    )
    assert "engine-0, engine-1 could not be placed within 20 s (infeasible)" in said
    assert "has CPU 4, engine_node 1, reward_node 1" in said and "has CPU 4, trainer_node 1" in said


def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    config = write_small_run(tmp_path)
    said = refusal(*train_command(config, tmp_path / "out", "127.0.0.1:1"))
    assert said.startswith("tailrace: host.address = '127.0.0.1:1': no cluster answers")


HANGS = """
import time

def hangs_at_odd(prompt, completion):
    if int(prompt[0]) % 2:
        time.sleep(60)
    return 1.0
"""


def test_rewards_of_a_file_travel_to_the_nodes_and_a_call_that_hangs_is_killed_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    """With a reference model, two ranks of the trainer, and weights in files."""
    config = write_small_run(tmp_path)
    (tmp_path / "beside.py").write_text(HANGS)
    (tmp_path / "rewards.py").write_text("from beside import hangs_at_odd\n")
    words = [
        *("--reward.function", f"{tmp_path / 'rewards.py'}:hangs_at_odd", "--reward.timeout_s", "0.5"),
        *("--weights.transport", "filesystem", "--algorithm.kl_coef", "0.05"),
        *("--trainer.ranks", "2", "--run.rounds", "2", "--run.eval_every", "0"),
    ]
    folder = tmp_path / "out"
    done = subprocess.run(
        train_command(config, folder, cluster.address, *words), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for path in (folder / "samples").glob("*.jsonl") for line in path.read_text().splitlines()]
    samples = [json.loads(line) for line in lines]
    assert {(int(each["prompt"][0]) % 2, each["reward"]) for each in samples} == {(0, 1.0), (1, 0.0)}


def test_a_run_learns_outlives_the_node_of_an_engine_and_restarts_after_that_of_the_trainer(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, rounds = tmp_path / "out", 16
    words = [
        *("--engine.replicas", "2", "--host.restarts", "1", "--run.rounds", str(rounds)),
        *("--run.checkpoint_every", "1", "--run.eval_every", str(rounds), "--run.eval_prompts", "128"),
        *("--host.resources.engine", "{ engine_node = 1 }"),
        *("--host.resources.trainer", "{ trainer_node = 1 }"),
        *("--host.resources.reward", "{ reward_node = 0.1 }"),
    ]
    config = EXAMPLES / "quickstart" / "quickstart.toml"
    command = train_command(config, folder, cluster.address, *words)
    cluster.add("engine", "engine_node")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_steps(folder, 4, process)
        cluster.kill("engine")
        wait_for_steps(folder, num_steps(folder) + 4, process)
        cluster.add("spare", "engine_node", "trainer_node")
        cluster.kill("trainer")
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "trainer was lost with its actor or its node" in err
    assert "tailrace: restart 1 of 1" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["groups"]["trained"] == 32 * rounds
    assert summary["eval"]["last"] > summary["eval"]["first"] + 0.1
    with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    totals = totals_of(books)
    assert len(books.lives) == 2 and books.lives[2].round > 0
    assert totals.groups == {"trained": 32 * rounds}
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(folder / "counts")


@pytest.mark.vllm
def test_a_server_that_the_run_starts_is_placed_on_a_node_and_is_started_again_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    """vLLM, with LoRA adapters by its own route. Its node is killed."""
    folder, rounds = tmp_path / "out", 8
    words = [
        *("--engine.max_num_seqs", "64", "--run.rounds", str(rounds), "--run.eval_every", "0"),
        *("--run.checkpoint_every", "1", "--schedule.groups_per_round", "16"),
        *("--weights.transport", "filesystem", "--trainer.lora.publish", "adapter"),
        *("--host.resources.engine", "{ server_node = 1 }"),
        *("--host.resources.trainer", "{ trainer_node = 1 }"),
        *("--host.resources.reward", "{ reward_node = 0.1 }"),
    ]
    cluster.add("server", "server_node")
    config = EXAMPLES / "vllm.toml"
    command = train_command(config, folder, cluster.address, *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_steps(folder, 2, process)
        cluster.add("spare", "server_node")
        cluster.kill("server")
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert num_steps(folder) == rounds
    with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    assert len(books.lives) == 1, "the trainer has gone on"
    totals = totals_of(books)
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(folder / "counts")
