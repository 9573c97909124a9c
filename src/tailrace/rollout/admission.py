"""Admission: which of the waiting requests may be served now. One pure question, no I/O.

The pool asks about the request at the head of its line, which is in the order of launch; so every
admission serves the lowest groups first, and differs only in how many it lets in.
"""

from typing import Annotated, Literal, Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import Group


class Service(Protocol):
    """What an admission may know: who is being served."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_groups(self) -> int:
        """Groups that began to be served and still lack responses: the frontier."""

    def serves(self, group: Group) -> bool:
        """Is the group one of those?"""


class AtMost(Settings):
    """FIFO: a cap on the requests in service, or none."""

    kind: Literal["at_most"] = "at_most"
    requests: int | None = Field(default=None, ge=1)

    def admits(self, group: Group, service: Service) -> bool:
        return self.requests is None or service.num_requests < self.requests


class Frontier(Settings):
    """Frontier-group dispatch as printed (RolloutPipe eq. 5 and 6): only the `groups` lowest groups
    that still lack responses are served; the requests of all others are held."""

    kind: Literal["frontier"] = "frontier"
    groups: int = Field(ge=1)
    """F_w, the width of the frontier."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.serves(group) or service.num_groups < self.groups


class FrontierFirst(Settings):
    """Frontier-group dispatch that wastes no slot: as many requests as `groups` whole groups have, the
    lowest groups first; later groups fill what the frontier leaves free."""

    kind: Literal["frontier_first"] = "frontier_first"
    groups: int = Field(ge=1)
    """F_w, the width of the frontier."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.num_requests < self.groups * group.num_launched


FIFO = AtMost()
Admission = Annotated[AtMost | Frontier | FrontierFirst, Field(discriminator="kind")]
