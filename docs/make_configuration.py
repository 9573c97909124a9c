"""Writes docs/reference/configuration.md and simulation.md from the settings classes and the signatures of
the schedules.

    python docs/make_configuration.py docs/reference

A key has one row. Keys that several kinds of a section share stand in one table. The meaning of a key is the
first sentence of its documentation, and those that explain one of its values. A test compares the committed
file with the output.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from tailrace.config import RunConfig
from tailrace.kinds import import_all, sections_in
from tailrace.rollout.admission import Admission
from tailrace.schedules import SCHEDULES
from tailrace.settings import CHOSEN, Settings

INTRODUCTION = """\
# Configuration

A run has one TOML file. `--section.key VALUE` on the command line replaces a value of the file. Paths are
relative to the file. An unknown key or a value outside its range is refused before anything starts.

A default of *machine* is chosen from the machine and printed with its reason before a run starts. *none*: the
key is not set. Tables written as `[[section]]` may occur several times.
"""
HEADER = "|key|default|values|meaning|\n|---|---|---|---|"
SCHEDULES_HEADER = """\
## Parameters of the schedules

They are keys of `[schedule]`, beside its `name`. All have `order`, by default "launched".
[Schedules](schedules.md) describes each."""
SIMULATION = """\
# Configuration of virtual time

`[sim]` describes a machine or a cluster on which nothing is computed: `tailrace simulate`, `plan` and
`compare --virtual` read it. [Plan a cluster](../how-to/plan-a-cluster.md) has examples.
"""
SCHEDULE_TABLE = "|schedule|parameters|\n|---|---|"
PARAMETER_TABLE = "|parameter|values|meaning|\n|---|---|---|"
WORDS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "path", date: "date"}
WORDS |= {Any: "any value"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
TAKEN = "Set from "
"""How the documentation of a key begins that users set elsewhere."""
TAGS = ("kind", "transport")
"""Keys whose value selects one kind of a section."""

_REPEATED_RANGE = re.compile(r"; (above|at (least|most)|\d[\d,^]* to)\b[^.]*(?=\.)")
_SENTENCE_END = re.compile(r"(?<=\.)(?<!eq\.)(?<!Dr\.) (?=[A-Z\d`\"-]|[a-z_]+: )")
_EXPLAINS_A_VALUE = re.compile(
    r'(Without it|(None|Not set|Left out|Default|Empty|`[^`]*`|"[^"]*"|[\w.-]+)(,[^:]*| \([^)]*\))?:) '
)


class Row(NamedTuple):
    """One key: the cells of the table."""

    name: str
    default: str
    values: str
    meaning: str

    def __str__(self) -> str:
        meaning = re.sub(r"<(?=[/\w])", "&lt;", self.meaning)  # Markdown takes `<tool_call>` for HTML
        cells = (f"`{self.name}`", self.default, self.values, meaning)
        return f"|{'|'.join(_line(cell).replace('|', '&#124;') for cell in cells)}|"


def config_reference() -> tuple[str, str]:
    """Return two pages as Markdown: the sections of a run, and those of virtual time."""
    import_all()
    page = _Page()
    parts = [*page.root(), *_schedules(), *page.kinds("schedule.admission", Admission, 3)]
    found: tuple[list[str], list[str]] = [INTRODUCTION], [SIMULATION]
    of_time = False
    for part in filter(None, parts):
        if part.startswith("#"):
            of_time = re.match(r"#+ \[sim\b", part) is not None
        found[of_time].append(part)
    pages = ("\n\n".join(part.strip() for part in own) + "\n" for own in found)
    return next(pages), next(pages)


class _Page:
    """Where each class of settings was described first: it is described once."""

    def __init__(self) -> None:
        self._described: dict[type[Settings], str] = {}

    def root(self) -> Iterator[str]:
        for name, field in RunConfig.model_fields.items():
            if sections_in(field):
                yield from self.kinds(_key("", name, field), field, 2, field)
            else:
                yield f"## [{name}]\n\n{_line(field.description or '')}"

    def kinds(self, key: str, annotation: Any, level: int, field: FieldInfo | None = None) -> Iterator[str]:
        """Yield one section, or the kinds of a section: what they share, then what each has of its own."""
        sections = sections_in(annotation)
        if len(sections) == 1:
            yield from self._one(key, sections[0], level, field)
            return
        rows = {section: self._rows(section) for section in sections}
        every = [row for own in rows.values() for row in own]
        shared = [row for row in dict.fromkeys(every) if every.count(row) > 1]
        having = [section for section in sections if rows[section]]
        kinds = [f"- `{_tag(section)}`: {self._about(section)}" for section in sections]
        yield f"{'#' * level} [{key}]\n\n" + "\n".join(kinds)
        of = {row: [section for section in having if row in rows[section]] for row in shared}
        yield _table(
            row if of[row] == having else row._replace(meaning=f"({_which(having, of[row])}) {row.meaning}")
            for row in shared
        )
        for section in sections:
            own = [row for row in rows[section] if row not in shared]
            yield f"{'#' * (level + 1)} [{key}], `{_tag(section)}`" if own else ""
            yield _table(own)
            self._described[section] = f"[{key}], `{_tag(section)}`"
            yield from self._inner(key, section, level + 1)

    def _one(self, key: str, section: type[Settings], level: int, field: FieldInfo | None) -> Iterator[str]:
        heading = f"{'#' * level} [{key}]"
        if self._described.get(section) == f"[{key}]":
            return
        if section in self._described:
            yield f"{heading}\n\nAs {self._described[section]}."
            return
        intro = (field.description or "") if field and key.endswith("NAME") else ""
        yield f"{heading}\n\n{_line(f'{intro} {inspect.getdoc(section)}')}"
        yield _table(self._rows(section))
        self._described[section] = f"[{key}]"
        yield from self._inner(key, section, level)

    def _inner(self, key: str, section: type[Settings], level: int) -> Iterator[str]:
        known = self._known(section)
        for name, field in section.model_fields.items():
            if name not in known and sections_in(field):
                yield from self.kinds(_key(key, name, field), field, level, field)

    def _rows(self, section: type[Settings]) -> list[Row]:
        """The keys that hold no sections, without the tag, and without those of a kind that it extends."""
        known = self._known(section)
        tag = _tag(section).partition(" ")[0]
        return [
            _field_row(name, field)
            for name, field in section.model_fields.items()
            if name != tag
            and name not in known
            and not sections_in(field)
            and not (field.description or "").startswith(TAKEN)
        ]

    def _known(self, section: type[Settings]) -> set[str]:
        return {name for base in self._extended(section) for name in base.model_fields}

    def _extended(self, section: type[Settings]) -> list[type[Settings]]:
        return [base for base in section.__mro__[1:] if base in self._described]

    def _about(self, section: type[Settings]) -> str:
        as_before = [f"It has the keys of {self._described[base]}, too." for base in self._extended(section)]
        return " ".join((_line(inspect.getdoc(section) or ""), *as_before))


def _key(path: str, name: str, field: FieldInfo) -> str:
    repeated = get_origin(field.annotation) in (dict, Mapping)
    return ".".join(filter(None, (path, name, "NAME" if repeated else "")))


def _tag(section: type[Settings]) -> str:
    """Return the key and value that select a section, as TOML, or ""."""
    for key in TAGS:
        field = section.model_fields.get(key)
        if field and len(_literals(field.annotation)) == 1:
            return f'{key} = "{field.default}"'
    return ""


def _values(sections: Sequence[type[Settings]]) -> str:
    return ", ".join(_tag(section).partition('"')[2].rstrip('"') for section in sections)


def _which(every: Sequence[type[Settings]], having: Sequence[type[Settings]]) -> str:
    others = [section for section in every if section not in having]
    return f"not {_values(others)}" if len(others) == 1 else _values(having)


def _table(rows: Iterable[Row]) -> str:
    lines = [str(row) for row in rows]
    return "\n".join([HEADER, *lines]) if lines else ""


def _schedules() -> Iterator[str]:
    """Yield the parameters of each schedule, then the meaning of each parameter in the first that has it."""
    meanings: dict[tuple[str, str], str] = {}
    lines = []
    for name, schedule in SCHEDULES.items():
        hints, arguments = get_type_hints(schedule, include_extras=True), _arguments(schedule)
        shown = []
        for parameter in list(inspect.signature(schedule).parameters.values())[1:]:  # the first is the run
            meaning = arguments.get(parameter.name, "")
            key = (parameter.name, _allowed(hints[parameter.name]))
            meanings.setdefault(key, _short(meaning[:1].upper() + meaning[1:]))
            given = "" if parameter.default is inspect.Parameter.empty else _value(parameter.default)
            shown.append(f"`{parameter.name} = {given.strip('`')}`" if given else f"`{parameter.name}`")
        lines.append(f"|`{name}`|{', '.join(shown)}|")
    yield SCHEDULES_HEADER
    yield "\n".join([SCHEDULE_TABLE, *lines])
    rows = (f"|`{name}`|{allowed}|{meaning}|" for (name, allowed), meaning in sorted(meanings.items()))
    yield "\n".join([PARAMETER_TABLE, *rows])


def _arguments(function: object) -> Mapping[str, str]:
    """Return the entries of `Args:` of a docstring."""
    _, _, text = (inspect.getdoc(function) or "").partition("Args:\n")
    text, *_ = re.split(r"^(?:Returns|Raises|Example):$", text, flags=re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", text, flags=re.MULTILINE)
    return {name: _line(meaning) for name, meaning in entries}


def _field_row(name: str, field: FieldInfo) -> Row:
    default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
    default = "machine" if field.json_schema_extra == CHOSEN else default
    hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return Row(name, default, _allowed(hint), _short(field.description or ""))


def _short(text: str) -> str:
    """Return the first sentence and those that explain a value, without what the column of values says."""
    first, *others = _SENTENCE_END.split(_REPEATED_RANGE.sub("", _line(text)))
    return " ".join(
        [first, *(each for each in others if _EXPLAINS_A_VALUE.match(each) and each[:5] != "Range")]
    )


def _allowed(hint: Any) -> str:
    """Return the values that a type allows: the choices, and the type and range of others."""
    kind = _type(hint)
    choices = [f"`{choice}`" for choice in _literals(hint)]
    if choices:
        others = [] if kind == "string" else [kind.removeprefix("string or ")]
        return ", ".join(choices + others)
    found = _bounds(TypeAdapter(hint).core_schema)
    return " ".join([kind, *(f"{sign}{found[name]:.10g}" for name, sign in SIGNS.items() if name in found)])


def _type(hint: Any) -> str:
    """Return the type of a value in the words of TOML."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments if each is not NoneType))
    if origin is Literal:
        return "string"
    if origin is tuple:
        item = _type(arguments[0])
        return f"list of {item.replace('list', 'lists') if 'list' in item else item + 's'}"
    if origin in (dict, Mapping):
        return "table"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "table"
    return WORDS[hint]


def _bounds(schema: Any) -> Mapping[str, float]:
    """Return the bounds in a schema of pydantic, whatever wraps the number."""
    found = {name: schema[name] for name in SIGNS if isinstance(schema.get(name), int | float)}
    for inner in ("schema", "items_schema"):
        for each in schema.get(inner) if isinstance(schema.get(inner), list) else [schema.get(inner)]:
            if isinstance(each, dict):
                found |= _bounds(each)
    return found


def _literals(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Annotated, Union, UnionType):
        return tuple(value for each in get_args(hint) for value in _literals(each))
    return ()


def _value(value: Any) -> str:
    """Return a default as TOML."""
    if value is None:
        return "none"
    if isinstance(value, Settings):
        pairs = (f"{name} = {json.dumps(each)}" for name, each in value.model_dump(exclude_none=True).items())
        return f"`{{ {', '.join(pairs)} }}`"
    return f"`{json.dumps(value, default=str)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def main(arguments: Iterable[str]) -> None:
    """Write the pages to each folder given."""
    for folder in map(Path, arguments):
        for name, text in zip(("configuration", "simulation"), config_reference(), strict=True):
            (folder / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
