"""Every schedule learns on vLLM what it learns on the embedded engine: the quickstart's task, 64 steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_cases import running

from tailrace.api import train
from tailrace.config import load_config
from tailrace.extras.http import vllm
from tailrace.extras.http.server import free_port
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm import write_plugin

pytestmark = pytest.mark.vllm
EXAMPLE = Path(__file__).parents[4] / "examples" / "vllm.toml"
SCHEDULES = {
    "serial": (32, "groups_per_round = 32, groups_per_step = 16"),
    "rolloutpipe": (32, "groups_per_round = 32, groups_per_step = 16"),
    "april": (64, "groups_per_round = 16, groups_launched = 24"),
    "tailbatch": (64, "groups_per_round = 16"),
    "pipelinerl": (64, "groups_per_step = 16, in_flight_per_engine = 128, ring_groups = 32"),
    "tailrace": (64, "groups_per_step = 16, groups_in_flight = 32, staleness = 2"),
}
"""Rounds and parameters: 64 steps of 16 groups each, and a publication in every round. After 32 steps the
accuracies of five seeds of tailbatch on the embedded engine lie 0.33 apart, after 64 steps 0.08."""
SEED = 1
"""With seed 0 april's first batches can lower the entropy before they find a reward. It then needs between 16
and more than 64 steps, by chance. With seeds 1 to 6 it lies between 0.91 and 0.95 after 64 steps."""
SEED_NOISE = 0.1
"""By which the accuracies of two runs differ whose samples differ: three standard deviations of an evaluation
of 256 prompts at 0.9, and the noise of training."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server, which every run joins after another has left other weights in it."""
    config, folder, port = load_config(EXAMPLE), tmp_path_factory.mktemp("server"), free_port()
    assert isinstance(config.engine, VllmEngineSettings)
    assert config.sampling
    assert config.model
    launch = vllm.launch(
        config.engine,
        config.sampling,
        model=config.model.path,
        max_context=1024,
        port=port,
        plugins=write_plugin(folder / "plugin"),
    )
    with running(launch, port, folder) as url:
        yield url


def accuracy(schedule: str, folder: Path, engine: dict[str, str]) -> float:
    """The held-out accuracy at the end of a run."""
    rounds, parameters = SCHEDULES[schedule]
    overrides = {
        "schedule": f'{{ name = "{schedule}", {parameters} }}',
        "run.seed": str(SEED),
        "run.rounds": str(rounds),
        "run.eval_every": str(rounds),
        "run.checkpoint_every": "0",
    }
    summary = train(load_config(EXAMPLE, overrides | engine), folder)
    assert summary.eval is not None
    print(f"{schedule}: {summary.eval.last:.3f}")
    return summary.eval.last


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_learns_as_much_as_on_the_embedded_engine(schedule: str, url: str, tmp_path: Path) -> None:
    native = accuracy(schedule, tmp_path / "native", {"engine": "{ max_num_seqs = 256 }"})
    vllm = accuracy(schedule, tmp_path / "vllm", {"engine.urls": f'["{url}"]'})
    assert vllm > native - SEED_NOISE
