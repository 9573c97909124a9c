"""The samples of a run: those that were trained, from their files, and the others, from the ledger."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.config import RunConfig, load_config
from tailrace.errors import ConfigError, TailraceError
from tailrace.importing import install
from tailrace.ledger.base import SampleRow, TokensRow
from tailrace.ledger.store import open_store
from tailrace.record.samples import files_by_round

NUM_LISTED = 2_000
"""The newest samples are listed; any other can be opened by its id, or be found."""
MAX_SHOWN = 300
"""Characters of a prompt and of a text in the list."""
CONTEXT = 6
"""Tokens before a token that are decoded with it: some tokenizers write a space only between two tokens."""


class Defect(NamedTuple):
    """The first line of a file that has a problem, and the number of all such lines."""

    file: str
    line: int
    problem: str
    num_lines: int = 1


class SampleLine(msgspec.Struct):
    """A line of a samples file, as far as the list of samples shows it."""

    id: str
    reward: float | None
    num_tokens: int
    finish_reason: str | None
    step: int | None = None
    """The optimizer step that trained it; None: it is a held-out one."""
    prompt: str = ""
    text: str = ""
    advantage: float | None = None
    failure: str | None = None
    source: str = ""
    columns: dict[str, Any] = {}
    asked: str = ""
    """The prompt without the chat template; empty: a file of an earlier release."""

    def has(self, text: str) -> bool:
        """Whether a text is in its id, prompt, completion or columns."""
        places = (self.id, self.prompt, self.text, str(self.columns))
        return any(text.lower() in place.lower() for place in places)

    def listed(self, round: int) -> dict[str, Any]:
        """The row of the list, with the beginnings of prompt and text."""
        row = msgspec.structs.asdict(self) | {"round": round}
        del row["columns"], row["asked"]
        asked = (self.asked or self.prompt)[:MAX_SHOWN]
        return row | {"prompt": asked, "text": self.text[:MAX_SHOWN]}


class SampleName(msgspec.Struct):
    """The id in a line of a samples file, of which the rest may be damaged."""

    id: str = ""


class TokenTable(msgspec.Struct):
    """One entry for each token of a completion."""

    texts: Sequence[str]
    logprobs: Sequence[float]
    """Nats, under the policy that drew the token, at the sampling temperature."""


class SampleView(msgspec.Struct):
    """All that the files know of one sample."""

    id: str
    source: str
    """The file that it was read from; empty: only the run log knows it."""
    record: dict[str, Any]
    """Its line of the samples file, or what the ledger says of it."""
    spans: Sequence[tuple[str, int]]
    """[name of the version, tokens], in order."""
    tokens: TokenTable | None
    """Tokens with their log-probs; None: they were not recorded."""
    note: str = ""
    """Why something is missing."""


def whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """The lines of a file that another process may append to, and whether it ends within one more."""
    data = path.read_bytes() if path.exists() else b""
    whole, end, rest = data.rpartition(b"\n")
    return (whole + end).splitlines(keepends=True), bool(rest)


class SampleBook:
    """Finds samples of the run in an output directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: TokenTexts | None = None
        self.defects: list[Defect] = []
        """The first bad line of each file that the last list was read from."""

    def listed(
        self, *, held_out: bool = False, last_round: int | None = None, search: str = ""
    ) -> list[dict[str, Any]]:
        """Return the newest samples, the newest round first, and in it in the order of its file.

        Args:
            held_out: those of evaluations, instead of those that were trained.
            last_round: none of a later round.
            search: only samples with this text in their id, prompt, text or columns.
        """
        found: list[dict[str, Any]] = []
        self.defects = []
        files = files_by_round(self._folder / ("samples/eval" if held_out else "samples"))
        for round, path in reversed(files.items()):
            if last_round is None or round <= last_round:
                found += self._matching(path, round, search)
            if len(found) >= NUM_LISTED:
                break
        return found[:NUM_LISTED]

    def _matching(self, path: Path, round: int, search: str) -> Iterator[dict[str, Any]]:
        bad: list[int] = []
        for number, line in enumerate(whole_lines(path)[0], 1):
            try:
                sample = msgspec.json.decode(line, type=SampleLine)
            except (ValueError, RecursionError):
                bad.append(number)
                continue
            if not search or sample.has(search):
                yield sample.listed(round)
        if bad:
            self.defects.append(Defect(path.name, bad[0], "it is no sample", num_lines=len(bad)))

    def find(self, id: str) -> SampleView:
        """A sample, from its file or else from the ledger."""
        folders = (self._folder / "samples", self._folder / "samples" / "eval")
        for path in (path for each in folders for path in reversed(files_by_round(each).values())):
            for line in (each for each in whole_lines(path)[0] if id.encode() in each):
                try:
                    if msgspec.json.decode(line, type=SampleName).id == id:
                        return self._from_line(id, path, line)
                except (ValueError, RecursionError) as why:
                    return SampleView(id, "", {}, [], None, f"its line in {path.name} is damaged: {why}")
        try:
            return self._from_ledger(id)
        except (TailraceError, OSError, ValueError) as why:
            return SampleView(id, "", {}, [], None, f"it is in no samples file; the ledger: {why}")

    def _from_line(self, id: str, path: Path, line: bytes) -> SampleView:
        record = msgspec.json.decode(line)
        ids, logprobs = record.pop("completion_ids", None), record.pop("logprobs", [])
        spans = [(str(version), num) for version, num in record.get("spans", [])]
        note = "" if ids else "its tokens were not recorded (record.token_samples)"
        place = path.relative_to(self._folder).as_posix()
        view = SampleView(id, place, record, spans, None, note)
        return self._with_tokens(view, ids or [], logprobs)

    def _from_ledger(self, id: str) -> SampleView:
        config = self._config()
        with closing(open_store(config.ledger, self._folder, only_read=True)) as store:
            row = next((row for row in store.rows(SampleRow) if str(row.id) == id), None)
            if row is None:
                raise ConfigError("sample", id, "it has no such sample", "choose another")
            rows = [each for each in store.rows(TokensRow) if each.id == row.id]
        ids = np.frombuffer(b"".join(each.ids for each in rows), np.int32).tolist()
        logprobs = np.frombuffer(b"".join(each.logprobs for each in rows), np.float32).tolist()
        names = ("text", "reward", "failure", "finish_reason", "fate", "num_tokens")
        record = {name: getattr(row, name) for name in names} | {"fate": row.fate or "alive"}
        spans = [(f"{origin.life}.{origin.version}", origin.num_tokens) for origin in row.spans]
        note = "" if ids else "the ledger no longer keeps its tokens"
        return self._with_tokens(SampleView(id, "ledger", record, spans, None, note), ids, logprobs)

    def _with_tokens(self, view: SampleView, ids: Sequence[int], logprobs: Sequence[float]) -> SampleView:
        if not ids:
            return view
        try:
            if self._texts is None:
                model = self._config().model
                self._texts = TokenTexts([self._folder / "model", *([model.path] if model else [])])
            texts = self._texts.of(ids)
        except ConfigError as why:
            texts = [f"<{each}>" for each in ids]
            view.note = f"token ids instead of text: {why.problem}; {why.remedy}"
        view.tokens = TokenTable(texts, logprobs)
        return view

    def _config(self) -> RunConfig:
        return load_config(self._folder / "config.toml")


class TokenTexts:
    """Decodes token ids one by one, by the first of the model folders that has a tokenizer.json. Raises a
    ConfigError if none has one, it cannot be read, or no package is installed that could."""

    def __init__(self, folders: Sequence[Path]) -> None:
        paths = [each / "tokenizer.json" for each in folders]
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            places = ", ".join(map(str, folders))
            raise ConfigError("model.path", places, "no folder has a tokenizer.json", "put one there")
        if find_spec("tokenizers") is None:
            raise ConfigError("model.path", str(path), "tokenizers is not installed", install("train"))
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as why:  # the library raises bare exceptions
            problem = f"the tokenizer cannot be read ({why})"
            raise ConfigError("model.path", str(path), problem, "put a copy there") from why

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Joined they are the text, but for characters of several tokens."""
        return [self._text(ids[max(0, end - CONTEXT) : end + 1]) for end in range(len(ids))]

    def _text(self, ids: Sequence[int]) -> str:
        before: str = self._tokenizer.decode(ids[:-1], skip_special_tokens=False)
        whole: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        if whole.startswith(before):
            return whole[len(before) :]
        return str(self._tokenizer.decode(ids[-1:], skip_special_tokens=False))
