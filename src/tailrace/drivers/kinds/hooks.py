"""Hooks: what a command or a run asks of products beside kinds of sections. `kinds.kind_of` finds them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tailrace.config import LiveConfig
from tailrace.contracts.reward import Rewards
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.rollout.placement import DeviceSharing, PlacementSettings
from tailrace.rollout.reward_timeout import Anchors
from tailrace.sim.host import Host
from tailrace.sim.reward import SharedJudge
from tailrace.sim.settings import SimSettings


class RewardAudit(Protocol):
    """Hook reward.audit: what a reward pays for."""

    def faults(self, config: LiveConfig) -> Sequence[str]:
        """Score few rows of a checked config, without judges, for a few seconds. Return the faults."""

    def right_answers(self, config: LiveConfig, row: Mapping[str, object]) -> Sequence[str]:
        """Return the right answers of a row; none where they are unknown."""


class ProgramRewards(Protocol):
    """Hook reward.code: rewards of programs, for a run with [reward.code]."""

    def check(
        self, reward: RewardSettings, rows: Mapping[int, Mapping[str, object]], *, others: bool
    ) -> None:
        """Check the test cases of the first rows, by number, and that the sandbox is installed. Raises a
        ConfigError. `others`: whether other rewards score rows without test cases."""

    async def open(
        self,
        reward: RewardSettings,
        anchors: Anchors,
        text_of: Callable[[Sequence[int]], str],
        others: Rewards | None,
    ) -> Rewards:
        """Run an empty program, and return the rewards. Raises a ConfigError if the sandbox does not work."""


class FittedCosts(Protocol):
    """Hook sim.fitted: [sim] of a run that ended."""

    def sim(self, run: Path) -> SimSettings:
        """Return the costs of a run. Raises a ConfigError if there is none, or its files are damaged."""


class JoinedEngines(Protocol):
    """Hook placement.joined: engines that are joined to larger ones."""

    def sharing(
        self,
        sharing: DeviceSharing,
        placement: PlacementSettings,
        smallest: int,
        num_engines: int,
        sim: SimSettings | None,
    ) -> DeviceSharing:
        """Return the sharing of devices with the widths of engines. Raises a ConfigError if engines cannot be
        joined as asked, or the offline profile lacks a size. `smallest`: devices of one engine."""


class SimulatedJudges(Protocol):
    """Hook sim.judges: judges in virtual time."""

    def simulated(self, settings: SimSettings, hosts: Sequence[Host | None]) -> Sequence[SharedJudge]:
        """Return the judges of [sim.rewards.judge], one on each device of the engines of these hosts."""
