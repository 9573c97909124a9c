"""The mark of a folder, `.tailrace`: it lists the names that this program owns there. No command removes or
replaces anything else. A command writes the mark before any other file."""

import os
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from tailrace.errors import ConfigError

MARK, FORMAT = ".tailrace", 1


class Mark(msgspec.Struct):
    command: str
    """The command that wrote into the folder last; "": one of a release that wrote no marks, or none."""
    names: list[str]
    """Names directly in the folder, as patterns of a shell."""
    format: int = FORMAT
    version: str = ""
    """The release of that command; "": one that did not write it."""

    def owned_in(self, folder: Path) -> Iterator[Path]:
        """The files, folders and links of these names that are there."""
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if any(fnmatchcase(name, pattern) for pattern in self.names):
                yield folder / name


def read_mark(folder: Path) -> Mark | None:
    """The mark of a folder; None: it has none. Raises an OSError or a MsgspecError if it cannot be read."""
    path = folder / MARK
    return msgspec.json.decode(path.read_bytes(), type=Mark) if path.exists() else None


def claim(
    folder: Path,
    command: str,
    names: Collection[str],
    earlier: Collection[str],
    *,
    key: str = "--output-dir",
    only_check: bool = False,
    version: str = "",
) -> Mark:
    """Write the mark of a folder, which is made if it does not exist, before a command writes these names.
    Return the mark that was there. Raises a ConfigError if one of the names is there and not owned, or the
    folder cannot be written.

    Args:
        earlier: the names that are owned in a folder without a mark: a release that wrote none left them.
        key: the option or setting that names the folder.
        only_check: change nothing.
        version: `Mark.version`.
    """
    place = (key, str(folder))
    try:
        found = {*Mark("", [*names]).owned_in(folder)}  # before the mark, which another process writes first
        known = read_mark(folder) or Mark("", sorted(earlier))
        if known.format != FORMAT:
            raise ConfigError(*place, f"its {MARK} has format {known.format}, not {FORMAT}", "choose another")
        if foreign := sorted(path.name for path in found.difference(known.owned_in(folder))):
            problem = f"this command would replace what tailrace did not write there: {', '.join(foreign)}"
            raise ConfigError(*place, problem, "choose another, or move that away")
        mark, partial = (
            Mark(command, sorted({*known.names, *names}), version=version),
            folder / f"{MARK}.{os.getpid()}",
        )
        if mark != known and not only_check:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(mark) + b"\n")
            partial.replace(folder / MARK)
    except OSError as why:
        raise ConfigError(*place, f"it cannot be written ({why.strerror})", "choose another") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as why:
        raise ConfigError(*place, f"its {MARK} is no mark of tailrace ({why})", "choose another") from None
    return known


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
