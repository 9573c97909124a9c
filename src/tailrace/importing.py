"""Importing what a user names: 'package.module:name' or 'path/to/file.py:name'."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tailrace.errors import ConfigError


def import_function(spec: str, key: str) -> Any:
    """The callable that `spec` names; `key` is the setting that holds it.

    Raises:
        ConfigError: there is no such module, file or name, or it cannot be called.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(
            key, spec, "this names no function", "write 'package.module:name' or 'path/to/file.py:name'"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as why:
        raise ConfigError(
            key, spec, f"it cannot be imported ({why})", "check the module and its path"
        ) from why
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(key, spec, f"{place} has no function {name!r}", "name a function that it defines")
    return function


def _from_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"{path.stem} of {path.parent}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    module_spec.loader.exec_module(module)
    return module
