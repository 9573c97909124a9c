"""The files of examples/slurm on a real Slurm whose two nodes are processes of this machine."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cluster import Slurm, missing, slurm_cluster

from helpers.small_run import EXAMPLES, num_steps, trained_prompts, wait_for_steps, write_small_run
from tailrace.contracts.engine import counted_tokens
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger

pytestmark = pytest.mark.slurm
GROUPS = 128
"""Of the only round. A step trains two of them."""
WORDS = [
    *("--run.eval_every", "0", "--run.checkpoint_every", "0", "--run.rounds", "1"),
    *("--schedule.groups_per_round", str(GROUPS)),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if absent := missing():
        pytest.skip(
            f"needs Slurm and munge, and there is no {', '.join(absent)}: apt-get install slurm-wlm munge"
        )
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(slurm: Slurm, folder: Path, script: str) -> str:
    """The number of a job that trains a small run in `out`."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    slurm.environment |= environment
    return slurm.submit(
        f"--output={folder / 'job.log'}",
        str(EXAMPLES / "slurm" / script),
        str(write_small_run(folder)),
        str(folder / "out"),
        *WORDS,
    )


def audit(folder: Path, num_lives: int) -> None:
    """Nothing is lost, trained twice or unaccounted for."""
    with closing(Store.open(folder / "out" / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    assert len(books.lives) == num_lives
    totals = totals_of(books)
    lost = set(range(books.run.num_drawn)) ^ set(books.groups)
    trained = Counter(str(each.id) for each in books.trainings.values() if each.undone is None)
    twice = [sample for sample, times in trained.items() if times > 1]
    unaccounted = counted_tokens(folder / "out" / "counts") - totals.num_known_tokens - books.held_tokens
    assert (len(lost), len(twice), unaccounted) == (0, 0, 0)
    assert not any(training.undone for training in books.trainings.values()), "no step is repeated"
    assert "crash" not in totals.wasted_tokens, "no token is lost"
    assert set(totals.groups) == {"trained"} and totals.groups["trained"] >= GROUPS
    assert Counter(trained_prompts(folder / "out").values()) == {2: totals.groups["trained"]}


def test_a_job_of_two_nodes_that_is_preempted_twice_resumes_by_itself_and_loses_nothing(
    slurm: Slurm, tmp_path: Path
) -> None:
    """A job of more priority preempts it, then an operator puts it back into the queue."""
    out = tmp_path / "out"
    job = submit(slurm, tmp_path, "several_nodes.sbatch")
    wait_for_steps(out, 3)
    assert slurm.field(job, "NodeList") == "node[1-2]"
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    slurm.wait(urgent, "COMPLETED")
    before = num_steps(out)
    assert 3 <= before < GROUPS // 2 and slurm.field(job, "Restarts") == "1"
    wait_for_steps(out, before + 3)
    slurm.call("scontrol", "requeue", job)
    slurm.wait(job, "COMPLETED")
    assert slurm.field(job, "Restarts") == "2"
    said = (tmp_path / "job.log").read_text()
    assert said.count("; --resume continues from there") == 2, said
    audit(tmp_path, num_lives=3)


def test_a_job_of_one_node_resumes_after_a_signal_and_is_done_when_it_is_submitted_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The signal is that of a time limit (--signal=B:TERM@120)."""
    job = submit(slurm, tmp_path, "one_node.sbatch")
    wait_for_steps(tmp_path / "out", 3)
    slurm.call("scancel", "--batch", "--signal=TERM", job)
    slurm.wait(job, "COMPLETED")
    assert slurm.field(job, "Restarts") == "1"
    audit(tmp_path, num_lives=2)
    summary = (tmp_path / "out" / "summary.json").read_bytes()
    slurm.wait(submit(slurm, tmp_path, "one_node.sbatch"), "COMPLETED")
    assert (tmp_path / "out" / "summary.json").read_bytes() == summary
    audit(tmp_path, num_lives=2)


def test_the_files_are_valid_shell() -> None:
    for script in (EXAMPLES / "slurm").iterdir():
        subprocess.run(["bash", "-n", script], check=True)
