"""Writes docs/reference/commands.md and python.md from the docstrings of the commands and of the package.

    python docs/make_api.py docs/reference

A test compares the committed files with the output.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import tailrace
from tailrace.cli import OVERRIDES, application

COMMANDS = f"""\
# Commands

{OVERRIDES} `tailrace COMMAND --help` shows the same.

Exit codes: 0 done, 1 failed, 2 wrong arguments or config, 129, 130 and 143 ended by SIGHUP, SIGINT and
SIGTERM.
"""
PYTHON = """\
# Python

What `import tailrace` has. Other modules may move. [Write a schedule](../how-to/write-a-schedule.md) has the
verbs of `Run` by use.
"""


def commands() -> str:
    """Return the page of the commands: cyclopts writes each."""
    text = application().generate_docs(output_format="markdown", heading_level=1)
    _, *sections = re.split(r"^## tailrace ", text, flags=re.MULTILINE)
    return "\n".join([COMMANDS, *(f"## {section}" for section in sections)]).rstrip() + "\n"


def python() -> str:
    """Return the page of the public names."""
    parts = [PYTHON]
    for name in sorted(tailrace.__all__, key=str.lower):
        parts.extend(_entry(name, getattr(tailrace, name)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(name: str, value: object) -> Iterator[str]:
    yield f"## {name}"
    if inspect.isfunction(value):
        yield _code(name, value)
    elif not inspect.isclass(value):
        yield "One of: " + ", ".join(f"`{each}`" for each in value) + "."  # type: ignore[attr-defined]
        return
    yield _text(value)
    if inspect.isclass(value) and not issubclass(value, Exception) and not hasattr(value, "model_fields"):
        for key, member in vars(value).items():
            if inspect.isfunction(member) and key[0] != "_" and member.__doc__:
                yield _code(f"{name}.{key}", member)
                yield _text(member)


def _code(name: str, function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    shown = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(signature))
    return f"```text\n{name}{shown}\n```"


def _text(value: object) -> str:
    """The docstring, its sections as lists. Examples stay code."""
    text, example, shown = (inspect.getdoc(value) or "").partition("\nExample:\n")
    text = re.sub(
        r"^(Args|Returns|Raises|Yields):$", r"\n*\1*\n", text.replace("<", "&lt;"), flags=re.MULTILINE
    )
    text = re.sub(r"^    (\S)", r"- \1", text, flags=re.MULTILINE)
    text = re.sub(r"^ {6,}(\S)", r"  \1", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text) + (f"\n{example.strip()}\n\n{shown}" if example else "")


def main(arguments: Iterable[str]) -> None:
    """Write the pages to each folder given."""
    for folder in map(Path, arguments):
        (folder / "commands.md").write_text(commands(), encoding="utf-8")
        (folder / "python.md").write_text(python(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
