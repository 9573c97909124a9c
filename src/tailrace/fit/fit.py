"""From the files of a run to the [sim] section of a config."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.fit.base import FitPart
from tailrace.fit.decode import fit_aborts, fit_engines
from tailrace.fit.lengths import fit_lengths
from tailrace.fit.observed import observe
from tailrace.fit.rewards import fit_rewards
from tailrace.fit.trainer import fit_passes, fit_publications, fit_steps
from tailrace.sim.settings import SimSettings


@dataclass(frozen=True, slots=True)
class Fit:
    """What was fitted."""

    parts: Sequence[FitPart]

    @property
    def tree(self) -> dict[str, Any]:
        """The config: a table "sim" with the fitted values only."""
        tree: dict[str, Any] = {}
        for part in self.parts:
            for key, value in part.values.items():
                *sections, name = key.split(".")
                table = tree
                for section in sections:
                    table = table.setdefault(section, {})
                table[name] = value
        return tree

    @property
    def sim(self) -> SimSettings:
        return SimSettings.model_validate(self.tree["sim"])


def fit(events: Path, metrics: Path, samples: Path, workers: int) -> Fit:
    """Fit a run.

    Args:
        events: events.jsonl.
        metrics: metrics.jsonl.
        samples: the folder of the trained samples.
        workers: reward workers of the run.

    Raises:
        ConfigError: a file is missing or damaged; the message names the first bad line.
    """
    run = observe(events, metrics)
    parts = [
        fit_engines(run),
        fit_aborts(run),
        fit_passes(run),
        fit_steps(run),
        fit_publications(run),
        fit_rewards(run, workers),
        fit_lengths(run, samples),
    ]
    return Fit(parts)
