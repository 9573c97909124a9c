"""The disk that the checkpoints of a run need."""

import pytest

from helpers.tiny_models import save_tiny_model
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import LiveConfig, load_config
from tailrace.contracts.memory import ModelShape
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.assembly.disk import disk_need
from tailrace.drivers.kinds.base import trainer_kind


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LiveConfig:
    folder = tmp_path_factory.mktemp("disk")
    save_tiny_model(folder / "model", "qwen3")
    (folder / "run.toml").write_text(
        'run = { rounds = 1, group_size = 2 }\nschedule = { name = "serial", groups_per_round = 2 }\n'
        'model = { path = "model" }\ndata = { kind = "rows", path = "rows.jsonl" }\nsampling = {}\n'
    )
    return LiveConfig.of(load_config(folder / "run.toml"))


@pytest.mark.parametrize(
    ("changes", "end", "peak"),
    [
        ({"rounds": 9}, (1, 1), (1, 1)),
        ({"rounds": 1, "checkpoint_every": 1}, (1, 1), (2, 1)),
        ({"rounds": 2, "checkpoint_every": 1}, (2, 1), (2, 2)),
        ({"rounds": 9, "checkpoint_every": 2}, (2, 1), (3, 2)),
        ({"rounds": 9, "checkpoint_every": 2, "eval_every": 1}, (3, 1), (4, 2)),
        ({"rounds": 9, "checkpoint_every": 1, "keep_optimizer": 2}, (2, 2), (3, 3)),
        ({"rounds": 4, "checkpoint_every": 1, "keep_checkpoints": 0}, (5, 1), (5, 2)),
        ({"rounds": 4, "checkpoint_every": 1, "keep_checkpoints": 0, "keep_optimizer": 0}, (5, 4), (5, 4)),
    ],
)
def test_models_and_states_of_the_optimizer_are_counted_at_the_end_and_at_the_peak(
    changes: dict[str, int], end: tuple[int, int], peak: tuple[int, int], config: LiveConfig
) -> None:
    model, state = trainer_kind(config).checkpoint_bytes(config)
    need = disk_need(config.changed(run=changes))
    assert need.end == end[0] * model + end[1] * state
    assert need.peak == peak[0] * model + peak[1] * state


def test_a_checkpoint_has_the_model_and_the_moments_of_what_is_trained(config: LiveConfig) -> None:
    whole = ModelShape.read(config.model.path).num_parameters
    assert trainer_kind(config).checkpoint_bytes(config) == (4 * whole, 8 * whole)
    critic = config.changed(algorithm=AlgorithmSettings(advantage="gae").model_dump())
    assert trainer_kind(config).checkpoint_bytes(critic) == (4 * whole, 8 * 2 * whole + 4 * whole)
    lora = config.changed(trainer={"lora": LoraSettings(rank=2)})
    model, state = trainer_kind(config).checkpoint_bytes(lora)
    assert state == 2 * (model - 4 * whole) > 0
