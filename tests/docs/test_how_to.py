"""The commands of docs/how-to and of the first run, as they are printed, in the folder of "Your own run"."""

import json
import os
from pathlib import Path

import pytest

from helpers.page_runs import DOCS, commands, indented, run_here, write_files

YOUR_OWN_RUN = "start/your-own-run.md"
PAGES = [
    "how-to/" + page.name
    for page in sorted((DOCS / "how-to").glob("*.md"))
    if commands(f"how-to/{page.name}") and page.name != "ten-complaints.md"  # test_ten_complaints.py
]


ELSEWHERE = {
    "push": "needs the Hugging Face hub; tests/extras/hub",
    "serve": "serves until a signal comes; tests/extras/serve, tests/extras/tinker",
    "join": "needs a run that waits for it; tests/extras/cluster",
    "view": "serves until a signal comes; with --output it is run",
    "plan examples/cluster_plan.toml": "tests/extras/plan/test_plan.py",
    "advise LOG --device H100 --model Qwen3-4B": "needs a log of another framework; tests/extras/plan",
    "plan cluster.toml --from LOG": "needs a run of the cluster's model and devices; tests/extras/plan",
}
"""Indented commands that other tests run, or that need other machines."""
CLUSTER = """
[run]
rounds = 8
group_size = 2

[schedule]
name = "serial"
groups_per_step = 2

[schedules.serial]
groups_per_round = 2

[schedules.tailrace]
groups_in_flight = 4
staleness = 1

[plan]
steps = 16

[sim.cluster]
device = "H100"
devices = 4
model = "Qwen3-1.7B"
rollout_devices = 2

[sim.lengths]
max_tokens = 1024
"""
"""A `cluster.toml` whose steps have as many samples as those of the page's run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("how_to")
    write_files(YOUR_OWN_RUN, folder)
    run_here(folder, "train run.toml --output-dir runs/first")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(folder: Path, page: str) -> None:
    for command in commands(page):
        run_here(folder, command)


@pytest.mark.slow
def test_the_commands_of_the_first_run_run_in_their_order(tmp_path: Path) -> None:
    first, *others = commands("start/first-run.md")
    assert first == "quickstart --output-dir runs/quickstart"
    run_here(tmp_path, f"{first} --run.rounds 2")
    for command in others:
        run_here(tmp_path, command)
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["rounds"] == 2


@pytest.mark.slow
def test_the_indented_commands_of_the_planner_s_page_run_in_their_order(folder: Path) -> None:
    (folder / "cluster.toml").write_text(CLUSTER)
    for command in indented("how-to/plan-a-cluster.md"):
        if command not in ELSEWHERE:
            run_here(folder, command.replace("runs/one", "runs/first").replace("LOG", "runs/first"))
    assert (folder / "planned.toml").exists() and (folder / "fitted.toml").exists()


@pytest.mark.slow
def test_the_schedule_of_the_page_is_simulated_and_trained(folder: Path) -> None:
    write_files("how-to/write-a-schedule.md", folder)
    (folder / "mine.toml").write_text(
        (folder / "run.toml")
        .read_text()
        .replace('name = "rolloutpipe"', 'name = "mine.py:overlapped"')
        .replace("groups_per_round = 4\n", "")
    )
    for command in indented("how-to/write-a-schedule.md"):
        run_here(folder, command.replace("run.toml", "mine.toml"))


def test_each_indented_command_is_run_or_has_a_reason() -> None:
    run_here = {"plan-a-cluster.md", "write-a-schedule.md"}
    shown = [
        command
        for page in sorted(DOCS.glob("*/*.md"))
        for command in commands(f"{page.parent.name}/{page.name}")
    ]
    pages = [DOCS.parent / "README.md", *(DOCS / "start").glob("*.md"), *(DOCS / "how-to").glob("*.md")]
    left = [
        command
        for page in pages
        if page.name not in run_here
        for command in indented(os.path.relpath(page, DOCS))
        if not any(command.startswith(each) for each in ELSEWHERE)
        and not any(each.startswith(command) for each in shown)
    ]
    assert left == []
