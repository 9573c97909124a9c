"""Writes docs/configuration.md from the settings classes and the signatures of the schedules.

    python docs/make_configuration.py docs/configuration.md

A test compares the committed file with the output.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from tailrace.config import RunConfig
from tailrace.rollout.admission import Admission
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.settings import CHOSEN, Settings, sections_in

INTRODUCTION = """\
# Configuration

A run has one TOML file. `--section.key VALUE` on the command line replaces a value of the file. Numbers are
finite. Paths are relative to the file. An unknown key or a value outside its range is refused before anything
starts.

This page is generated: `make docs` writes it.
"""
HEADER = "| key | type | default | range | meaning |\n|---|---|---|---|---|"
SCHEDULES_HEADER = "## The parameters of each schedule\n\nThey are keys of `[schedule]`, beside its `name`."
ADMISSION_HEADER = "### admission\n\nWhich of the waiting requests may be served: a table with a `kind`."
WORDS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "path", Any: "any value"}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >="}


def config_reference() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION, *_section("", RunConfig), SCHEDULES_HEADER]
    for name, schedule in SCHEDULES.items():
        parts += _schedule(name, schedule)
    parts.append(ADMISSION_HEADER)
    for kind in sections_in(Admission):
        parts += _section("schedule.admission", kind, level=4)
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _section(path: str, section: type[Settings], level: int = 2, intro: str = "") -> Iterator[str]:
    """Yield the heading, the description and the table of a section, then its sub-sections."""
    fields = section.model_fields
    plain = {name: field for name, field in fields.items() if not sections_in(field.annotation)}
    if path:
        yield f"{'#' * level} [{path}]{_kind_of(section)}\n\n{_line(f'{intro} {inspect.getdoc(section)}')}"
        yield "\n".join(
            [HEADER, *(_field_row(name, field) for name, field in plain.items())] if plain else []
        )
    else:
        for name, field in plain.items():
            yield f"## [{name}]\n\n{_line(field.description or '')}"
    for name, field in fields.items():
        repeated = get_origin(field.annotation) in (dict, Mapping)
        key = ".".join(filter(None, (path, name, "NAME" if repeated else "")))
        for inner in sections_in(field.annotation):
            yield from _section(key, inner, level, field.description or "" if repeated else "")


def _kind_of(section: type[Settings]) -> str:
    """Return the suffix of a heading that tells a section from others of the same name."""
    for key in ("kind", "transport"):
        field = section.model_fields.get(key)
        if field and len(_literals(field.annotation)) == 1:
            return f', `{key} = "{field.default}"`'
    return ""


def _schedule(name: str, schedule: Schedule) -> Iterator[str]:
    summary, arguments = _docstring(schedule)
    yield f"### {name}\n\n{summary}"
    hints = get_type_hints(schedule, include_extras=True)
    _, *parameters = inspect.signature(schedule).parameters.values()  # the first is the run
    rows = []
    for parameter in parameters:
        hint = hints[parameter.name]
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else _value(parameter.default)
        meaning = arguments.get(parameter.name, "")
        meaning = meaning[:1].upper() + meaning[1:]
        rows.append(_row(parameter.name, _type(hint), default, _range(hint), meaning))
    yield "\n".join([HEADER, *rows])


def _docstring(function: object) -> tuple[str, Mapping[str, str]]:
    """Return the text of a docstring before its first section, and the entries of `Args:`."""
    text = inspect.getdoc(function) or ""
    summary, *sections = re.split(r"^(Args|Returns|Raises|Example):$", text, flags=re.MULTILINE)
    blocks = dict(zip(sections[::2], sections[1::2], strict=True))
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", blocks.get("Args", ""), flags=re.MULTILINE)
    return _line(summary), {name: _line(meaning) for name, meaning in entries}


def _field_row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
    default = "from the machine" if field.json_schema_extra == CHOSEN else default
    hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _row(name, _type(hint), default, _range(hint), field.description or "")


def _row(name: str, kind: str, default: str, range_: str, meaning: str) -> str:
    cells = (f"`{name}`", kind, default, range_, meaning)
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


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
        return f"list of {_type(arguments[0])}s"
    if origin in (dict, Mapping):
        return "table"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "table"
    return WORDS[hint]


def _range(hint: Any) -> str:
    """Return the values that a type allows, from its metadata."""
    if choices := _literals(hint):
        return ", ".join(f"`{choice}`" for choice in choices)
    schema = TypeAdapter(hint).core_schema
    return ", ".join(
        f"{sign} {bounds[name]:g}" for name, sign in SIGNS.items() if name in (bounds := _bounds(schema))
    )


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
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(config_reference())


if __name__ == "__main__":
    main(sys.argv[1:])
