"""Write questions of BFCL v4 (package bfcl-eval) whose right calls are known, as rows.

python examples/bfcl/make_rows.py

bfcl.jsonl  messages, of which the system's has the functions, and the accepted calls
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
SYSTEM = """You may call functions. Their signatures are:
{functions}
Write each call as <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>, and nothing else."""


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of all categories. The package is not imported: it needs clients of many services."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("install the package bfcl-eval first: requirements/environments.txt")
    data = Path(spec.origin).parent / "data"
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        answers = {each["id"]: each["ground_truth"] for each in _read(data / "possible_answer" / name)}
        for question in _read(data / name):
            functions = "\n".join(map(json.dumps, question["function"]))
            system = {"role": "system", "content": SYSTEM.format(functions=functions)}
            prompt = [system, *(each for each in question["question"][0] if each["role"] == "user")]
            yield {"id": question["id"], "prompt": prompt, "answer": answers[question["id"]]}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    path = Path(__file__).with_name("bfcl.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
