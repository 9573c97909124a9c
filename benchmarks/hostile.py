"""Hostile programs for the sandbox, drawn from a seed.

They are in hostile_programs.txt: several variants of each kind, in which names in braces are replaced:

    {SECRET}   path of a file of the host that nothing may read or change
    {FOLDER}   its folder
    {PORT}     a port of the host on which a server listens, on all addresses, for TCP and UDP
    {ADDRESS}  an address of the host
    {SOCKET}   name of an abstract Unix socket of the host
    {N}        a number that differs between programs

A program that prints the content of the file has escaped.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("hostile_programs.txt")
"""Each program follows a line `---- KIND`."""


def read_kinds() -> dict[str, list[str]]:
    """Return the variants of each kind."""
    kinds: dict[str, list[str]] = {}
    for part in PROGRAMS.read_text().removeprefix("---- ").split("\n---- "):
        kind, _, text = part.partition("\n")
        kinds.setdefault(kind, []).append(text)
    return kinds


@dataclass(frozen=True, slots=True)
class Hostile:
    """A hostile program."""

    kind: str
    text: str


def corpus(count: int, seed: int, names: dict[str, str]) -> Iterator[Hostile]:
    """Yield programs: the kinds in turn, a variant of each drawn from the seed; each combines it with noise.

    Args:
        names: what the names in braces are replaced by.
    """
    chance = random.Random(f"hostile {seed}")
    variants = read_kinds()
    kinds = list(variants)
    orders = {kind: chance.sample(texts, len(texts)) for kind, texts in variants.items()}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        turn = number // len(kinds)
        text = orders[kind][turn % len(orders[kind])]
        for name, value in {**names, "N": str(chance.randrange(1, 100_000))}.items():
            text = text.replace(f"{{{name}}}", value)
        yield Hostile(kind, _disguised(text, chance))


def _disguised(text: str, chance: random.Random) -> str:
    """Return a program that does the same: directly, in a function, a thread, a child or at the exit."""
    body = f"exec({text!r}, {{'__name__': '__main__'}})"
    forms = (
        text,
        f"def main():\n    {body}\nmain()",
        f"import threading\nt = threading.Thread(target=lambda: {body})\nt.start()\nt.join()",
        f"import os\nif os.fork() == 0:\n    {body}\nelse:\n    os.wait()",
        f"import atexit\natexit.register(lambda: {body})",
        f"import sys, subprocess\nprint(subprocess.run([sys.executable, '-c', {text!r}], stdout=1))",
    )
    return chance.choice(forms)
