"""What a checkpoint remembers besides the weights: where the run stands and every group that lives.

A coroutine cannot be saved. A killed run starts its schedule again at the top of a round, so this is taken
there: the counters, the shelf in its order, and the groups in flight with the tokens they have.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from tailrace.errors import CheckpointError
from tailrace.ledger.ledger import Totals
from tailrace.types import FinishReason, Group, Prompt, Sample, SampleId, Span

STATE_FILE = "run.msgpack"


class SampleState(msgspec.Struct, frozen=True):
    """A Sample without its group."""

    id: SampleId
    seed: int
    completion_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: FinishReason | None
    text: str
    reward: float | None
    failure: str | None
    advantage: float
    fate: str | None
    kept: int | None
    """Place among its group's kept samples."""
    reference_logprobs: list[float]

    @classmethod
    def of(cls, sample: Sample) -> "SampleState":
        kept = sample.group.kept
        return cls(
            sample.id,
            sample.seed,
            sample.completion_ids,
            sample.logprobs,
            sample.spans,
            sample.finish_reason,
            sample.text,
            sample.reward,
            sample.failure,
            sample.advantage,
            sample.fate,
            kept.index(sample) if sample in kept else None,
            sample.reference_logprobs,
        )

    def revive(self, group: Group) -> Sample:
        return Sample(
            id=self.id,
            group=group,
            seed=self.seed,
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            reference_logprobs=self.reference_logprobs,
            spans=self.spans,
            num_tokens=sum(span.num_tokens for span in self.spans),
            finish_reason=self.finish_reason,
            text=self.text,
            reward=self.reward,
            failure=self.failure,
            advantage=self.advantage,
            fate=self.fate,
        )


class GroupState(msgspec.Struct, frozen=True):
    """A Group whose prompt is known by its number."""

    prompt: int
    need: int
    num_launched: int
    attempt: int
    born: int | None
    deferrals: int
    samples: list[SampleState]
    drawn: int = 0

    @classmethod
    def of(cls, group: Group) -> "GroupState":
        return cls(
            group.prompt.index,
            group.need,
            group.num_launched,
            group.attempt,
            group.born,
            group.deferrals,
            [SampleState.of(sample) for sample in group.samples],
            group.drawn,
        )

    def revive(self, prompt: Prompt) -> Group:
        group = Group(
            prompt=prompt,
            need=self.need,
            samples=[],
            num_launched=self.num_launched,
            attempt=self.attempt,
            born=self.born,
            drawn=self.drawn,
            deferrals=self.deferrals,
        )
        group.samples = [state.revive(group) for state in self.samples]
        places = [
            (state.kept, sample)
            for state, sample in zip(self.samples, group.samples, strict=True)
            if state.kept is not None
        ]
        group.kept = [sample for _, sample in sorted(places, key=lambda place: place[0])]
        return group


class RunState(msgspec.Struct):
    """Where a run stands at the top of a round."""

    config_digest: str = ""
    round: int = 0
    version: int = 0
    cursor: int = 0
    """The next prompt to draw."""
    num_generated: int = 0
    """Tokens the engines of this run's earlier lives produced that are still accounted for."""
    totals: Totals = msgspec.field(default_factory=Totals)
    longest: dict[int, int] = {}
    """Of each row of the data: its longest response when it was last trained."""
    steps_at: dict[int, int] = {}
    """Optimizer steps at each publication."""
    parked: list[GroupState] = []
    in_flight: list[GroupState] = []

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_bytes(msgspec.msgpack.encode(self))

    @classmethod
    def load(cls, folder: Path, config_digest: str) -> "RunState":
        """
        Raises:
            CheckpointError: the file is missing or torn, or of another config.
        """
        path = folder / STATE_FILE
        try:
            state = msgspec.msgpack.decode(path.read_bytes(), type=cls, dec_hook=_counter)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; remove {folder} and resume again") from None
        except msgspec.DecodeError as why:
            raise CheckpointError(f"{path} is torn ({why}); remove {folder} and resume again") from None
        if state.config_digest != config_digest:
            raise CheckpointError(
                f"{folder} belongs to another config; resume with the run's own config.toml, or choose "
                "another --output-dir"
            )
        return state

    def revive(self, groups: list[GroupState], prompt_of: Callable[[int], Prompt]) -> list[Group]:
        return [state.revive(prompt_of(state.prompt)) for state in groups]


def _counter(_: type, counts: dict[str, int]) -> Counter[str]:
    """The only type in a state that msgspec does not know."""
    return Counter(counts)
