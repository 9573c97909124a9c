"""What requests gain: the tokens that an engine adds between a request's start and its end."""

from tailrace.record.events import Event, RequestEnded, RequestStarted
from tailrace.types import SampleId


class Gains:
    """Counts generated tokens. Samples of an evaluation (prompts below zero) do not count."""

    def __init__(self) -> None:
        self._had: dict[SampleId, int] = {}
        """Tokens that each running request brought along."""

    def of(self, event: Event) -> int:
        """Tokens gained by the request that this event ends; 0 for any other event. Shown each event once."""
        match event:
            case RequestStarted() if event.sample.prompt >= 0:
                self._had[event.sample] = event.num_tokens
            case RequestEnded() if event.sample in self._had:
                return event.num_tokens - self._had.pop(event.sample)
        return 0
