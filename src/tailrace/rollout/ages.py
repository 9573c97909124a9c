"""The groups of a pool, counted by the oldest version of their tokens.

The counts follow each group as it changes, so a selection that needs them looks at no group.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from tailrace.types import Group


class Ages:
    """Groups that are in flight or ready."""

    def __init__(self) -> None:
        self.by_version: Counter[int] = Counter()
        """Number of groups with tokens, by the oldest version."""
        self._without_tokens: set[Group] = set()
        self._held_over: set[Group] = set()  # those without tokens that came before the last publication
        self._has_arrived: Callable[[], bool] = lambda: True

    def add(self, group: Group) -> None:
        group.on_older = partial(self._older, group)
        if group.oldest_version is None:
            self._without_tokens.add(group)
        else:
            self.by_version[group.oldest_version] += 1

    def remove(self, groups: Iterable[Group]) -> None:
        """Count groups no longer. They may have been removed before."""
        for group in groups:
            if group.on_older is not None:
                group.on_older = None
                self._forget(group, group.oldest_version)

    def published(self, has_arrived: Callable[[], bool]) -> None:
        """A version was published.

        Args:
            has_arrived: whether every engine has loaded it.
        """
        self._has_arrived = has_arrived
        self._held_over = set(self._without_tokens)

    @property
    def may_start_older(self) -> set[Group]:
        """The groups whose first token may be of the version before the published one.

        An engine reports the tokens of the old weights when the new weights arrive. Until then a group
        without reported tokens may have some of the old version.
        """
        if self._held_over and self._has_arrived():
            self._held_over = set()
        return self._held_over

    def _older(self, group: Group, before: int | None, version: int) -> None:
        self._forget(group, before)
        self.by_version[version] += 1

    def _forget(self, group: Group, version: int | None) -> None:
        if version is None:
            self._without_tokens.discard(group)
            self._held_over.discard(group)
        else:
            self.by_version[version] -= 1
            if not self.by_version[version]:
                del self.by_version[version]
