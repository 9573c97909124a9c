"""The base class of all config sections: frozen, typed, no unknown keys.

A section is defined in the folder that it configures, in `base.py` or `settings.py`; `config.py` joins the
sections. None of these modules imports torch, so a config is checked before torch is loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

CHOSEN: JsonDict = {"chosen": True}
"""Mark of a field that a live run on this host chooses from the machine where the config does not set it
(drivers/assembly/machine.py). Elsewhere its default holds."""


T = TypeVar("T")
RESUMABLE = "resumable"
Resumable = Annotated[T, RESUMABLE]
"""A field, or a section with all its fields, that a resumed run may have changed. The others decide which
prompts are drawn, what a token or a reward means, or what is learnt."""
SHARED = "shared"
Shared = Annotated[T, SHARED]
"""A text that may leave the machine in a model card, a tracker or a page, as numbers and literals do. Of a
path: its name, or id on the hub; of a function: a built-in one; of a dictionary: numbers and booleans."""


@dataclass(frozen=True, slots=True)
class InFolder:
    """Mark of a field whose text may name a file. In a config file the name is relative to the file's folder.
    `resolve`: given the folder and the text, returns the absolute name, or the text if it names no file."""

    resolve: Callable[[Path, str], str]


def _absolute(folder: Path, text: str) -> str:
    return str((folder / text).resolve())


def absolute_function(folder: Path, text: str) -> str:
    """Resolve the file in 'path/to/file.py:name'; a module stays a name."""
    return _absolute(folder, text) if text.partition(":")[0].endswith((".py", ".pkl")) else text


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path has no NUL character")
    return path


PlainPath = Annotated[Path, AfterValidator(_without_nul)]
RunPath = Annotated[PlainPath, InFolder(_absolute)]
"""A path, in a config file relative to it."""
RunFunction = Annotated[str, InFolder(absolute_function)]
"""'package.module:function', or 'path/to/file.py:function'; in a config file the path is relative to it."""
FolderOrName = Annotated[
    Shared[str], InFolder(lambda folder, text: _absolute(folder, text) if (folder / text).is_dir() else text)
]
"""A name, unless there is such a folder beside the config file."""


class Settings(BaseModel):
    """One section of the config. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def changed(self, **values: Any) -> Self:
        """Return the section with other values, which are not checked. In place of a section a mapping gives
        other values of it: `config.changed(run={"rounds": 2})`."""
        for key, value in values.items():
            if isinstance(value, Mapping) and isinstance(section := getattr(self, key), Settings):
                values[key] = section.changed(**value)
        return self.model_copy(update=values)


def marks_of(field: FieldInfo) -> Iterator[object]:
    """Yield what `Annotated` says of a field, or of the entries of its array."""
    yield from field.metadata
    yield from _marks_in(field.annotation)


def _marks_in(annotation: Any) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks_in(part)
