"""The base class of all config sections: frozen, typed, no unknown keys.

A section is defined in the `base.py` of the room that it configures; `config.py` joins the sections. None of
these modules imports torch, so a config is checked before torch is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, LiteralString, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

CHOSEN: JsonDict = {"chosen": True}
"""Of a field that a live run on this host chooses from the machine where the config does not set it
(assembly/machine.py). Its default holds elsewhere."""


T = TypeVar("T")
RESUMABLE = "resumable"
Resumable = Annotated[T, RESUMABLE]
"""A field, or a section with all its fields, that a resumed run may have changed. The others decide which
prompts are drawn, what a token or a reward means, or what is learnt."""


@dataclass(frozen=True, slots=True)
class InFolder:
    """Of a field whose text may name a file. In a config file the name is relative to the file's folder.

    Args:
        resolve: given the folder and the text, returns the absolute name, or the text if it names no file.
    """

    resolve: Callable[[Path, str], str]


def _absolute(folder: Path, text: str) -> str:
    return str((folder / text).resolve())


def absolute_function(folder: Path, text: str) -> str:
    """Resolve the file in 'path/to/file.py:name'; a module stays a name."""
    return _absolute(folder, text) if text.partition(":")[0].endswith((".py", ".pkl")) else text


RunPath = Annotated[Path, InFolder(_absolute)]
"""A path, in a config file relative to it."""
RunFunction = Annotated[str, InFolder(absolute_function)]
"""'package.module:function', or 'path/to/file.py:function'; in a config file the path is relative to it."""
FolderOrName = Annotated[
    str, InFolder(lambda folder, text: _absolute(folder, text) if (folder / text).is_dir() else text)
]
"""A name, unless there is such a folder beside the config file."""


def default_tag(default: str, key: str = "kind") -> Discriminator:
    """Discriminator of a union of sections by a key that may be left out."""

    def tag(value: Any) -> str:
        return str(value.get(key, default) if isinstance(value, dict) else getattr(value, key, default))

    return Discriminator(tag)


class Settings(BaseModel):
    """One section of the config. Numbers are finite, and no value is turned into one of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_types(cls, tree: Any) -> Any:
        given = tree if isinstance(tree, dict) else {}
        fields = {name: field for name, field in cls.model_fields.items() if name in given}
        problems = {name: type_problem(given[name], field.annotation) for name, field in fields.items()}
        errors = [
            InitErrorDetails(type=PydanticCustomError("type", problem), loc=(name,), input=given[name])
            for name, problem in problems.items()
            if problem
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return tree


def sections_in(annotation: Any) -> list[type[Settings]]:
    """Return the sections that the type of a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def marks_of(field: FieldInfo) -> Iterator[object]:
    """Yield what `Annotated` says of a field, or of the entries of its array."""
    yield from field.metadata
    yield from _marks_in(field.annotation)


def _marks_in(annotation: Any) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks_in(part)


def type_problem(value: object, annotation: Any) -> LiteralString | None:
    """Return why a value is none of an annotation, where pydantic would convert it: booleans, numbers and
    texts. Its strict mode would also refuse the lists and texts of TOML for tuples and paths."""
    types = _types_in(annotation) - {NoneType}
    wrong = {bool: bool not in types, int: types == {bool}, float: types == {bool}, str: str not in types}
    if types & {bool, int, float} and types <= wrong.keys() and wrong.get(type(value)):
        return "write true or false" if types == {bool} else "this is not a number"
    if Path in types and "\0" in str(value):
        return "a path has no NUL character"
    return "an integer has at most 64 bits" if isinstance(value, int) and abs(value) >= 2**63 else None


def _types_in(annotation: Any) -> set[Any]:
    """The types of a union, or the one type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _types_in(parts[0])
    if origin in (Union, UnionType):
        return {each for part in parts for each in _types_in(part)}
    return {type(each) for each in parts} if origin is Literal else {annotation}
