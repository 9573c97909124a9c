"""The samples of a run: those that were trained, from their files, and the others, from the ledger."""

from collections.abc import Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.config import RunConfig, load_config
from tailrace.errors import ConfigError, TailraceError
from tailrace.ledger.base import SampleRow, TokensRow
from tailrace.ledger.store import open_store

NUM_LISTED = 300
"""The newest samples are listed; any other can be opened by its id."""
CONTEXT = 6
"""Tokens before a token that are decoded with it: some tokenizers write a space only between two tokens."""


class Defect(NamedTuple):
    """The first line of a file that has a problem, and the number of all such lines."""

    file: str
    line: int
    problem: str
    num_lines: int = 1


class SampleLine(msgspec.Struct):
    """A sample in the list: a line of a samples file."""

    id: str
    step: int
    reward: float | None
    num_tokens: int
    finish_reason: str | None
    completion_ids: msgspec.Raw = msgspec.Raw()


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


class SamplesFile:
    """The trained samples of a round, as they were when the file had a stamp (mtime and size)."""

    def __init__(self, path: Path, stamp: tuple[int, int]) -> None:
        self.stamp, self.name = stamp, path.name
        self.listed: list[dict[str, object]] = []
        self.defect: Defect | None = None
        """Its first bad line."""
        self.ranges: dict[str, tuple[int, int]] = {}
        """Start and end in the file of the line of each sample."""
        end = 0
        for number, line in enumerate(whole_lines(path)[0], 1):
            start, end = end, end + len(line)
            try:
                sample = msgspec.json.decode(line, type=SampleLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.defect = self.defect or Defect(path.name, number, "it is no sample")
                continue
            self.ranges[sample.id] = (start, end)
            listed = msgspec.structs.asdict(sample)
            listed["has_tokens"] = bool(bytes(listed.pop("completion_ids")))
            self.listed.append(listed)


class SampleBook:
    """Finds samples of the run in an output directory by id. It reads a file again when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: TokenTexts | None = None
        self._files: dict[Path, SamplesFile] = {}
        """The newest round last."""

    def update(self) -> None:
        before, self._files = self._files, {}
        for path in sorted((self._folder / "samples").glob("round_*.jsonl")):
            status, known = path.stat(), before.get(path)
            stamp = (status.st_mtime_ns, status.st_size)
            self._files[path] = known if known and known.stamp == stamp else SamplesFile(path, stamp)

    @property
    def listed(self) -> list[dict[str, object]]:
        """The newest samples, the newest last."""
        newest = chain.from_iterable(reversed(file.listed) for file in reversed(self._files.values()))
        return [*islice(newest, NUM_LISTED)][::-1]

    @property
    def defects(self) -> list[Defect]:
        return [file.defect for file in self._files.values() if file.defect]

    def find(self, id: str) -> SampleView:
        """A sample, from its file or else from the ledger."""
        if path := next((path for path, file in reversed(self._files.items()) if id in file.ranges), None):
            try:
                return self._from_file(id, path, *self._files[path].ranges[id])
            except (msgspec.DecodeError, UnicodeDecodeError) as why:
                return SampleView(id, "", {}, [], None, f"its line in {path} is damaged: {why}")
        try:
            return self._from_ledger(id)
        except (TailraceError, OSError, ValueError) as why:
            return SampleView(id, "", {}, [], None, f"it is in no samples file; the ledger: {why}")

    def _from_file(self, id: str, path: Path, start: int, end: int) -> SampleView:
        with path.open("rb") as file:
            file.seek(start)
            record = msgspec.json.decode(file.read(end - start))
        ids, logprobs = record.pop("completion_ids", None), record.pop("logprobs", [])
        spans = [(str(version), num) for version, num in record.get("spans", [])]
        note = "" if ids else "its tokens were not recorded (record.token_samples)"
        view = SampleView(id, f"samples/{path.name}", record, spans, None, note)
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
            self._texts = self._texts or TokenTexts(self._model_folders())
            texts = self._texts.of(ids)
        except TailraceError as why:
            texts = [f"<{each}>" for each in ids]
            view.note = f"token ids instead of text: {why}"
        view.tokens = TokenTable(texts, logprobs)
        return view

    def _model_folders(self) -> list[Path]:
        model = self._config().model
        return [self._folder / "model", *([model.path] if model else [])]

    def _config(self) -> RunConfig:
        return load_config(self._folder / "config.toml")


class TokenTexts:
    """Decodes token ids one by one, by the first of the model folders that has a tokenizer.json. Raises a
    ConfigError if none has one, or it cannot be read."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from tokenizers import Tokenizer

        paths = [each / "tokenizer.json" for each in folders]
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            places = ", ".join(map(str, folders))
            raise ConfigError("model.path", places, "no folder has a tokenizer.json", "put one there")
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
