"""Episodes of agents over a scripted policy, with real sockets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tailrace.contracts.environments import Environment
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import load_tokenizer, text_of
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.environments.history import Chat, RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.extras.agents.settings import AgentSettings
from tailrace.rollout.episode import Episode
from tailrace.types import Group, Prompt, Sample, SampleId

MODEL = Path(__file__).parents[3] / "examples" / "tools" / "model"
TOKENIZER = load_tokenizer(MODEL)
END = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
QUESTION = "Solve the following multiplication: 12 * 34. Give only the result as your final answer."


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    """The context of a first turn."""
    text = TOKENIZER.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return encode(text)


def new_sample(prompt_ids: Sequence[int]) -> Sample:
    row = {"question": QUESTION, "answer": "408"}
    group = Group(Prompt(3, prompt_ids, QUESTION, row, given=QUESTION), 1, [])
    return Sample(SampleId(3, 0, 1), group)


class Script:
    """An engine whose turns are known. Their numbers stand in `served`, their limits in `limits`."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.served: list[int] = []
        self.limits: list[float] = []

    async def serve(self, sample: Sample) -> None:
        number = sum(1 for turn in sample.turns if turn.num_tokens)
        self.served.append(number)
        self.limits.append(sample.turn_limit)
        ids = [*encode(self.turns[number]), *END]
        sample.extend(ids, [-0.25 * (place + 1) for place in range(len(ids))], version=number)
        sample.finish_reason = "stop"


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Environment]:
    """The environment of an agent."""
    data = RowsSettings(path=Path("unused.jsonl"))
    agent = AgentSettings(kind="agent", **settings)
    async with environment_kind(agent).open(
        agent, TOKENIZER, RequestEncoder(data, TOKENIZER, 512)
    ) as environment:
        assert environment is not None
        yield environment


def episode(sample: Sample, script: Script, *, max_context_tokens: int = 512) -> Episode:
    return Episode(
        sample,
        script.serve,
        Chat(TOKENIZER, "agent", {}, "user").observe,
        text_of(TOKENIZER),
        sampling=SamplingSettings(),
        max_context_tokens=max_context_tokens,
        parking_timeout_s=0.0,
    )
