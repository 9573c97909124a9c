"""Rules for members of a group that fail, are late or are not needed: [run.groups]."""

import asyncio
from collections.abc import Callable

from pydantic import Field, model_validator

from tailrace.settings import Settings
from tailrace.types import Group, Prompt


class GroupSettings(Settings):
    """By default a group waits for all K samples; one whose reward or environment fails is dropped. Rules
    change that, under any schedule. Advantages are computed over the trained samples."""

    keep: int | None = Field(default=None, ge=1)
    """Members with which a group is trained: the first so many to be generated (k of K). The others are cut;
    their tokens are waste, "raced". None: all K."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the start of a group's first request, on the run's clock, after which members that are not
    generated are late. They are replaced or lost, and their tokens are waste, "late". A group of which none
    is left is dropped, and another prompt is drawn. The deadline begins anew for replacements of late
    members, and for a group that was parked."""
    replacements: int = Field(default=0, ge=0, le=65_536)
    """New samples, with seeds of their own, that a group may launch for members that failed or are late. One
    that fails while more than `keep` are alive needs none. Without replacements left the member is lost."""
    control: int = Field(default=0, ge=0)
    """Every n-th prompt is a control group, to which no rule applies. `length_bias` and `reward_bias` compare
    the others with these groups, and are as uncertain as means over so few prompts. 0: none."""

    @model_validator(mode="after")
    def _check_control(self) -> "GroupSettings":
        if self.control == 1 or (self.control and not self.has_rule):
            raise ValueError(
                "control needs 2 or more, and a rule (keep, deadline_s, replacements) to measure"
            )
        return self

    @property
    def has_rule(self) -> bool:
        return bool(self.keep or self.deadline_s or self.replacements)

    def applies_to(self, prompt: Prompt) -> bool | None:
        """Whether the rules apply to the group of a prompt, as `Group.has_rules`."""
        return not self.control or prompt.index % self.control > 0 if self.has_rule else None


class Deadlines:
    """A timer for each group in service, from the start of its first request."""

    def __init__(self, seconds: float | None, on_late: Callable[[Group], None]) -> None:
        self._seconds, self._on_late, self._timers = seconds, on_late, dict[Group, asyncio.TimerHandle]()

    def begin(self, group: Group) -> None:
        """Start the timer of a group, at its first request."""
        if self._seconds and group.has_rules and group not in self._timers:
            later = asyncio.get_running_loop().call_later
            self._timers[group] = later(self._seconds, self._on_late, group)

    def end(self, group: Group) -> None:
        """Cancel the deadline of a group."""
        if timer := self._timers.pop(group, None):
            timer.cancel()
