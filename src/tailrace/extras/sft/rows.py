"""Rows with a given response, as samples that the run's trainer takes: prompt tokens, then the response."""

from collections import Counter
from collections.abc import Mapping

from tailrace.config import RunConfig
from tailrace.contracts.data import Split
from tailrace.drivers.data.encoding import PromptEncoder, Tokenizer, is_prompt
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.data.rows import tools_of
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.model_folder import context_length, end_of_text_ids
from tailrace.types import Group, Prompt, Sample, SampleId

CHECKED_ROWS = 256
"""Rows that are read before anything starts, and the most in succession without a response."""


class ResponseRows:
    """The rows of one split in the endless order of a run's prompts, as samples of one response each."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, split: Split) -> None:
        """Raises a ConfigError if the data are no rows, or cannot be read."""
        assert config.model and config.data
        if not isinstance(config.data, RowsSettings):
            raise ConfigError("data.kind", config.data.kind, "responses are given by rows", 'write "rows"')
        data, path = config.data.model_copy(update={"max_prompt_tokens": None}), config.model.path
        self._data, self._column = data, config.sft.response_column
        self._context, self._ends = context_length(path), sorted(end_of_text_ids(path))[:1]
        self._encoder = PromptEncoder(data, tokenizer)
        self._prompts = open_prompts(data, tokenizer, seed=config.run.seed, split=split)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of a row. Its advantage is 1: minus its log-prob is the loss. Raises a BadRow if
        the row has no response, an empty one, or more tokens than the model's context."""
        row = self._prompts[index]
        asked, response = self._divided(row)
        tools = tools_of(row.row.get(self._data.tools_column))
        text, prompt_ids = self._encoder.encode(asked, tools)
        ids = self._encoder.encode_response(asked, text, response, tools, self._ends)
        if (num := len(prompt_ids) + len(ids)) > self._context:
            raise BadRow("longer than the context", f"{num} tokens, and the model has {self._context}")
        sample = Sample(SampleId(index, 0, 0), Group(Prompt(index, prompt_ids, text), 1, []), advantage=1.0)
        sample.extend(ids, [0.0] * len(ids), 0)
        return sample

    def take(self, drawn: int, num: int) -> tuple[list[Sample], int, Counter[str]]:
        """Return the next usable rows of the order, after so many that were drawn before; then how many were
        drawn; then the number of skipped ones by reason. Raises a ConfigError if `CHECKED_ROWS` in succession
        are skipped."""
        samples, skipped, reasons = list[Sample](), Counter[str](), list[str]()
        while len(samples) < num:
            try:
                samples.append(self[drawn])
                reasons.clear()
            except BadRow as bad:
                skipped[bad.reason] += 1
                reasons.append(f"{bad.reason} ({bad.detail})")
            drawn += 1
            if len(reasons) == CHECKED_ROWS:
                problem = (
                    f"{CHECKED_ROWS} rows in succession have no response to train; the first: {reasons[0]}"
                )
                remedy = "name the column in sft.response_column, or correct the rows"
                raise ConfigError("data.path", str(self._data.path), problem, remedy)
        return samples, drawn, skipped

    def _divided(self, row: Prompt) -> tuple[object, Mapping[str, object]]:
        """Return the prompt of a row, and its response as a message."""
        asked, given = row.given, row.row.get(self._column)
        if given is None and isinstance(asked, list) and asked[-1].get("role") == "assistant":
            *asked, given = asked
        message = given[0] if isinstance(given, list) and len(given) == 1 else given
        if isinstance(message, str):
            message = {"role": "assistant", "content": message}
        if not isinstance(message, Mapping):
            raise BadRow("no response", f"columns: {', '.join(row.row)}")
        if not is_prompt(asked):
            raise BadRow("no prompt", f"found {asked!r:.80}")
        if not (message.get("content") or message.get("tool_calls")):
            raise BadRow("an empty response")
        return asked, message
