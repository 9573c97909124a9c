"""Write two files of sums of numbers with two digits, each after four that are solved, and their answers.

python examples/gemma3/make_sums.py

train.jsonl      what is trained
held_out.jsonl   the same of numbers that it does not add up, for an evaluation
"""

import json
import random
from itertools import product
from pathlib import Path

NUM_ROWS, NUM_HELD_OUT = 2000, 1024
SOLVED = "<bos>12 + 35 = 47\n68 + 57 = 125\n20 + 31 = 51\n49 + 36 = 85\n"
"""A base model follows examples, and Gemma needs the first token."""


def write(name: str, pairs: list[tuple[int, int]]) -> None:
    rows = [json.dumps({"prompt": f"{SOLVED}{a} + {b} =", "answer": str(a + b)}) for a, b in pairs]
    path = Path(__file__).with_name(f"{name}.jsonl")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    numbers = range(10, 100)
    pairs = random.Random(0).sample([*product(numbers, numbers)], NUM_ROWS + NUM_HELD_OUT)
    write("train", pairs[:NUM_ROWS])
    write("held_out", pairs[NUM_ROWS:])


if __name__ == "__main__":
    main()
