"""Rows with a given response, as samples that the run's trainer takes: prompt tokens, then the response."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tailrace.config import LiveConfig
from tailrace.contracts.data import Split
from tailrace.drivers.data.encoding import PromptEncoder, Tokenizer, is_prompt
from tailrace.drivers.data.rows import RowPrompts, tools_of
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.model_folder import context_length, end_of_text_ids
from tailrace.types import Group, Prompt, Sample, SampleId

CHECKED_ROWS = 256
"""Rows that are read before anything starts, and the most in succession without a response."""


class ResponseRows:
    """The rows of one split in the endless order of a run's prompts, as samples of one response each."""

    def __init__(self, config: LiveConfig, tokenizer: Tokenizer, split: Split) -> None:
        """Raises a ConfigError if the data are no rows, or cannot be read."""
        if not isinstance(config.data, RowsSettings):
            raise ConfigError("data.kind", config.data.kind, "responses are given by rows", 'write "rows"')
        data, path = config.data.model_copy(update={"max_prompt_tokens": None}), config.model.path
        self._data, self._column = data, config.sft.response_column
        # The first of them ends what the chat template does not end.
        ends = sorted(end_of_text_ids(path), key=lambda id: id != tokenizer.eos_token_id)
        self._context, self._ends = context_length(path), ends
        self._encoder = PromptEncoder(data, tokenizer)
        self._rows = RowPrompts(data, self._encoder, config.run.seed, split, self._column)
        self.taught_ends, self.remarks = set[int](), list[str]()
        """Tokens that end the responses that were read, and what to know of the chat template."""
        self._examples: dict[str, str] = {}

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of a row. Its advantage is 1: minus its log-prob is the loss. Raises a BadRow if
        the row has no response, an empty one, or more tokens than the model's context."""
        row = self._rows.row(self._place(index))
        asked, response = self._divided(row)
        tools = tools_of(row.get(self._data.tools_column))
        text, prompt_ids = self._encoder.encode(asked, tools)
        ids = self._encoder.encode_response(asked, text, response, tools, self._ends)
        if (num := len(prompt_ids) + len(ids)) > self._context:
            raise BadRow("longer than the context", f"{num} tokens, and the model has {self._context}")
        self.taught_ends.add(ids[-1])
        self.remarks = self.remarks or [*self._encoder.remarks(asked)]
        sample = Sample(SampleId(index, 0, 0), Group(Prompt(index, prompt_ids, text), 1, []), advantage=1.0)
        sample.extend(ids, [0.0] * len(ids), 0)
        return sample

    def take(self, drawn: int, num: int, *, once: bool = False) -> tuple[list[Sample], int, Counter[str]]:
        """Return the next usable rows of the order, after so many that were drawn before; then how many were
        drawn; then the number of skipped ones by reason, with the first row of each. Raises a ConfigError if
        `CHECKED_ROWS` in succession are skipped, or all that there are. `once`: of the first epoch only."""
        samples, skipped, reasons = list[Sample](), Counter[str](), list[str]()
        last = len(self._rows.places) if once else None
        while len(samples) < num and drawn != last:
            try:
                samples.append(self[drawn])
                reasons.clear()
            except BadRow as bad:
                first = f"{bad.reason} (the first: row {self._place(drawn)}: {bad.detail})"
                reasons.append(self._examples.setdefault(bad.reason, first))
                skipped[reasons[-1]] += 1
            drawn += 1
            if len(reasons) == CHECKED_ROWS or drawn == last == len(reasons):
                problem = f"{len(reasons)} rows in succession have no response to train: {reasons[0]}"
                remedy = "name the column in sft.response_column, or correct the rows"
                raise ConfigError("data.path", str(self._data.path), problem, remedy)
        return samples, drawn, skipped

    def _place(self, index: int) -> int:
        return self._rows.places[self._rows.epochs.row_at(index)]

    def _divided(self, row: Mapping[str, Any]) -> tuple[object, Mapping[str, object]]:
        """Return the prompt of a row, and its response as a message."""
        asked: Any = row.get(self._data.prompt_column)
        given, is_chat = row.get(self._column), isinstance(asked, list) and is_prompt(asked)
        if given is None and is_chat and asked[-1].get("role") == "assistant":
            *asked, given = asked
        message = given[0] if isinstance(given, list) and len(given) == 1 else given
        message = {"content": message} if isinstance(message, str) else message
        if not isinstance(message, Mapping):
            raise BadRow("no response", f"columns: {', '.join(row)}")
        if not is_prompt(asked):
            raise BadRow("no prompt", f"found {asked!r:.80}")
        if not (message.get("content") or message.get("tool_calls")):
            raise BadRow("an empty response")
        return asked, {**message, "role": message.get("role") or "assistant"}
