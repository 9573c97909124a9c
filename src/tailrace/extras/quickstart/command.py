"""`tailrace quickstart`: a model of 0.4M parameters learns sums."""

from collections.abc import Mapping
from pathlib import Path

from tailrace.config import load_config
from tailrace.drivers.assembly.running import train
from tailrace.importing import check_training

CONFIG = Path(__file__).parent / "quickstart.toml"


def quickstart(*, output_dir: Path = Path("runs/quickstart"), overrides: Mapping[str, str]) -> None:
    """Train the quickstart's model: two CPU cores, some minutes.

    Args:
        output_dir: for all files of the run. An earlier quickstart there is replaced.
    """
    check_training("model.path", str(CONFIG.parent / "model"), "quickstart")
    train(load_config(CONFIG, overrides), output_dir, command="quickstart")
    print(f"next      tailrace inspect {output_dir}; its config, to start from: {output_dir / 'config.toml'}")
