"""Write two files of sums of a number with two digits and one with one, each after four that are solved.

python examples/gemma3/make_sums.py

train.jsonl      what is trained
held_out.jsonl   the same of numbers that it does not add up, for an evaluation
"""

import json
import random
from itertools import product
from pathlib import Path

NUM_HELD_OUT = 200
SOLVED = "<bos>12 + 5 = 17\n68 + 7 = 75\n20 + 3 = 23\n99 + 6 = 105\n"
"""A base model follows examples, and Gemma needs the first token."""


def write(name: str, pairs: list[tuple[int, int]]) -> None:
    rows = [json.dumps({"prompt": f"{SOLVED}{a} + {b} =", "answer": str(a + b)}) for a, b in pairs]
    path = Path(__file__).with_name(f"{name}.jsonl")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    pairs = [*product(range(10, 100), range(1, 10))]
    random.Random(0).shuffle(pairs)
    write("train", pairs[NUM_HELD_OUT:])
    write("held_out", pairs[:NUM_HELD_OUT])


if __name__ == "__main__":
    main()
