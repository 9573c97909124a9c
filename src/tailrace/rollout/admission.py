"""Admission: which of the waiting requests may be served now. Pure functions, no I/O.

The pool asks about the first request of its queue. The queue is in the order of launch, unless a schedule
sets another (`Pool.order`). So admissions differ only in how many requests they let in.
"""

from typing import Annotated, Literal, Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import Group


class Service(Protocol):
    """What an admission may read: the requests in service."""

    @property
    def num_requests(self) -> int:
        """Requests on engines."""

    @property
    def num_engines(self) -> int:
        """Engines that are open."""

    @property
    def num_groups(self) -> int:
        """Groups in service that lack samples: the frontier (RolloutPipe 3.3)."""

    def serves(self, group: Group) -> bool:
        """Whether the group is in the frontier."""


class AtMost(Settings):
    """FIFO admission with an optional cap on the requests in service."""

    kind: Literal["at_most"] = "at_most"
    requests_per_engine: int | None = Field(default=None, ge=1)
    """Requests in service, for each open engine (PipelineRL's H). None: as many as engines have slots."""

    def admits(self, group: Group, service: Service) -> bool:
        cap = self.requests_per_engine
        return cap is None or service.num_requests < cap * service.num_engines


class Frontier(Settings):
    """Frontier-group dispatch as printed (RolloutPipe eq. 5 and 6).

    Only the `groups` groups launched first that still lack samples are served. All other requests wait.
    """

    kind: Literal["frontier"] = "frontier"
    groups: int = Field(ge=1)
    """Width of the frontier (F_w)."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.serves(group) or service.num_groups < self.groups


class FrontierFirst(Settings):
    """Frontier-group dispatch in which later groups fill the slots that the frontier leaves free.

    As many requests are in service as `groups` whole groups have. Because the queue is in the order of
    launch, this admits the same requests as a FIFO queue with a cap of groups * K requests in all; the cap is
    only given in another unit.
    """

    kind: Literal["frontier_first"] = "frontier_first"
    groups: int = Field(ge=1)
    """Width of the frontier (F_w)."""

    def admits(self, group: Group, service: Service) -> bool:
        return service.num_requests < self.groups * group.num_launched


FIFO = AtMost()
Admission = Annotated[AtMost | Frontier | FrontierFirst, Field(discriminator="kind")]
