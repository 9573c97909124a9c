"""Who runs: admission in order of arrival, growth from tier to tier, preemption of the youngest.

Decides and keeps the books; computes nothing. What must hold: a response is either waiting, or running
with a slot; running responses are ordered by admission, so the youngest is the last.
"""

from collections import deque
from dataclasses import dataclass

from tailrace.engine.base import EngineSettings
from tailrace.engine.native.cache import Block, Cache, Response
from tailrace.engine.native.lot import Lot


@dataclass(frozen=True, slots=True)
class Admission:
    """Responses with the same context, whose keys and values are computed or copied once for all."""

    context: tuple[int, ...]
    """All tokens but the last, which is the input of the first decode step."""
    responses: list[Response]
    donor: Response | None = None
    """A running response that has the context in its cache."""
    block: Block | None = None
    """What an earlier life of the request left; without it and without a donor the context is computed."""


class Scheduler:
    """Waiting and running responses."""

    def __init__(self, cache: Cache, settings: EngineSettings) -> None:
        self.cache = cache
        self.settings = settings
        self.waiting: deque[Response] = deque()
        self.running: dict[str, Response] = {}
        self.num_preempted = 0
        self.lot = Lot()
        self._ids: set[str] = set()
        """Of all that wait or run."""

    def add(self, response: Response) -> None:
        """Let it wait.

        Raises:
            ValueError: another with its id waits or runs.
        """
        if response.id in self._ids:
            raise ValueError(f"request {response.id!r} is already being served; abort it first")
        self._ids.add(response.id)
        self.waiting.append(response)

    def admit(self, version: int) -> list[Admission]:
        """Give slots to those who wait, as far as slots, cache and the prefill budget of a step go."""
        admissions: list[Admission] = []
        shared: dict[tuple[int, ...], Admission] = {}
        budget = self.settings.prefill_tokens
        while self.waiting and len(self.running) < self.settings.max_running:
            response = self.waiting[0]
            if not self.cache.has_room(response):
                break
            context = tuple(response.tokens[:-1])
            block = self.lot.take(response)
            admission = None if block else shared.get(context)
            if admission is None:
                donor = None if block else self._donor(response, version)
                admission = Admission(context, [], donor, block)
                cost = 0 if block or donor else len(context)
                if block is None and cost > budget < self.settings.prefill_tokens:
                    break
                budget -= cost
                admissions.append(admission)
                shared.setdefault(context, admission)
            self.waiting.popleft()
            self._enter(response)
            response.prompt_version = None if block else version
            self.running[response.id] = response
            admission.responses.append(response)
        return admissions

    def _enter(self, response: Response) -> None:
        """Give it a slot; what is parked gives way to a tier that must grow."""
        self.lot.make_room(self.cache.spare_for(response))
        self.cache.enter(response)

    def park(self, response: Response) -> None:
        """Keep what the cache holds of a running response that is about to be removed."""
        block = self.cache.read(response, len(response.tokens) - 1)
        self.lot.put(response, block, self.cache.budget - self.cache.num_allocated)

    def _donor(self, response: Response, version: int) -> Response | None:
        """A running response to the same prompt, which this version computed. Only for a fresh request."""
        if response.num_completion:
            return None
        for other in self.running.values():
            if (
                other.prompt_version == version
                and other.num_prompt == response.num_prompt
                and other.tokens[: other.num_prompt] == response.tokens
            ):
                return other
        return None

    def grow(self) -> None:
        """Move each response that fills its tier to the next, the oldest first; the youngest pay."""
        for response in list(self.running.values()):
            if response.tier is None or len(response.tokens) <= response.tier.capacity:
                continue
            while not self.cache.has_room(response):
                self._preempt_youngest()
                if response.tier is None:
                    break
            else:
                self.lot.make_room(self.cache.spare_for(response))
                self.cache.move(response)

    def _preempt_youngest(self) -> None:
        _, youngest = self.running.popitem()
        self.cache.leave(youngest)
        self.waiting.appendleft(youngest)
        self.num_preempted += 1

    def end(self, response: Response) -> None:
        """Forget a running response."""
        self._ids.remove(response.id)
        del self.running[response.id]
        self.cache.leave(response)

    def remove(self, id: str) -> Response | None:
        """Forget a response wherever it is; None if nobody knows it."""
        running = self.running.get(id)
        if running is not None:
            self.end(running)
            return running
        for response in self.waiting:
            if response.id == id:
                self._ids.remove(id)
                self.waiting.remove(response)
                return response
        return None

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_allocated + self.lot.num_tokens <= self.cache.budget
        cached = self.cache.responses()
        assert len(cached) == len(self.running) <= self.settings.max_running
        assert all(self.running[response.id] is response for response in cached)
        assert all(response.tier is None for response in self.waiting)
        assert sorted(self._ids) == sorted([*self.running, *(response.id for response in self.waiting)])
