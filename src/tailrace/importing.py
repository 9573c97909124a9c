"""Import of user code that the config names: 'package.module:name' or 'path/to/file.py:name'.

A function of a script or a notebook is no part of a module that another process can import. It is saved with
the run, as 'path/to/reward.pkl:name'.
"""

import importlib
import importlib.util
import json
import pickle
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tailrace.errors import ConfigError


def import_function(spec: str, key: str) -> Any:
    """Import a callable. Raises a ConfigError if the module, the file or the name does not exist, the import
    raises, or the object is not callable.

    Args:
        spec: 'package.module:name' or 'path/to/file.py:name'. A file can import modules of its own folder,
            at import time and later inside its functions.
        key: the config key that holds `spec`, for the error message.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(
            key, spec, "this names no function", "write 'package.module:name' or 'path/to/file.py:name'"
        )
    try:
        if place.endswith(".pkl"):
            return pickle.loads(Path(place).read_bytes())
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as why:
        problem = f"it cannot be imported ({described(why)})"
        raise ConfigError(key, spec, problem, "check the module and its path") from why
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(key, spec, f"{place} has no function {name!r}", "name a function that it defines")
    return function


TRAINING = ("torch", "transformers", "huggingface_hub", "cloudpickle")
"""The packages of the extra `train`, as they are imported."""


def check_training(key: str, value: object, extra: str = "train") -> None:
    """Check that the packages with which a model is trained or served are installed, without importing them.
    Raises a ConfigError.

    Args:
        key: of the setting, or the name of the argument, that asks for a model.
        value: of it.
        extra: `train`, or another one that brings its packages, too.
    """
    if missing := [name for name in TRAINING if importlib.util.find_spec(name) is None]:
        problem = f"a model needs packages that are not installed: {', '.join(missing)}"
        raise ConfigError(key, value, problem, install(extra))


def install(extra: str) -> str:
    """Return the command that installs an extra of this package where it is installed: by the same tool, from
    the same source, and with the extras that the tool would otherwise remove."""
    origin, installer = _origin()
    uv, pipx = (Path(sys.prefix) / name for name in ("uv-receipt.toml", "pipx_metadata.json"))
    kept: list[str] = []
    if uv.exists():
        tool = "uv tool install"
        installed = tomllib.loads(uv.read_text(encoding="utf-8"))["tool"]["requirements"]
        kept = next((each.get("extras", []) for each in installed if each["name"] == "tailrace"), [])
    elif pipx.exists():
        tool = "pipx install --force"
        given = json.loads(pipx.read_text(encoding="utf-8"))["main_package"]["package_or_url"]
        found = re.search(r"\[([\w,-]+)\]", given)
        kept = found[1].split(",") if found else []
    else:
        tool = "uv pip install" if installer == "uv" else "pip install"
    editable = " --editable" if origin.get("dir_info", {}).get("editable") else ""
    return f"{tool}{editable} {source(','.join(dict.fromkeys([*kept, extra])))}"


def source(extra: str = "") -> str:
    """Return the argument of pip that names this package, where it came from, quoted for a shell."""
    origin, _ = _origin()
    name, url = f"[{extra}]" if extra else "", str(origin.get("url", ""))
    if url.startswith("file:"):  # a checkout, a wheel or an sdist
        return shlex.quote(url2pathname(urlsplit(url).path) + name)
    if "vcs_info" in origin:
        url = "{vcs}+{url}@{commit_id}".format(url=url, **origin["vcs_info"])
    return shlex.quote(f"tailrace{name} @ {url}" if url else f"tailrace{name}")


def _origin() -> tuple[dict[str, Any], str]:
    """Return direct_url.json (PEP 610), which a package from an index does not have, and the installer."""
    try:
        package = metadata.distribution("tailrace")
    except metadata.PackageNotFoundError:
        return {}, ""
    direct_url, installer = package.read_text("direct_url.json"), package.read_text("INSTALLER")
    return json.loads(direct_url or "{}"), (installer or "").strip()


def saved_function(function: Callable[..., Any], key: str) -> bytes:
    """Return the content of a .pkl file of a function, with what it uses of a script or a notebook. Raises a
    ConfigError if it is not callable, or uses what belongs to this process."""
    import cloudpickle

    if not callable(function):
        raise ConfigError(key, function, "it is not callable", "give a function")
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as why:  # whatever the objects that it uses raise
        problem = f"it cannot be sent to another process ({why})"
        raise ConfigError(key, function, problem, "let it open what it needs itself") from why


def _from_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"{path.stem} of {path.parent}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    try:
        with _folder_importable(str(path.resolve().parent)):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_spec.name]
        raise
    return module


@contextmanager
def _folder_importable(folder: str) -> Iterator[None]:
    """Put a folder first in sys.path inside the block, as for a script, and last after it.

    The functions of the file may import modules of the folder when they are called. Last, because worker
    processes inherit sys.path, and a user's random.py must not replace the library's there.
    """
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def described(why: BaseException) -> str:
    """Return type and message of an exception, and the line of the imported code that raised it."""
    (*_, message) = traceback.format_exception_only(why)
    importer, *frames = traceback.extract_tb(why.__traceback__)
    ours = (importer.filename, __file__, str(Path(importlib.__file__).parent), "<frozen")
    frames = [frame for frame in frames if not frame.filename.startswith(ours)]
    place = f"; {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{message.strip()}{place}"
