"""The models that vLLM lists are those of docs/reference/models.md."""

import ast
import os
import subprocess
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.architectures import ALONE, BY_TRANSFORMERS, EXACT, NOT_LISTED, SEPARATE

pytestmark = pytest.mark.vllm


def listed(registry: str, table: str) -> set[str]:
    """The architectures in a table of vLLM's registry, read from its source."""
    for node in ast.parse(registry).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                return {ast.literal_eval(key) for key in keys if key}
    raise AssertionError(f"the registry has no {table}")


def test_the_engines_of_the_page_are_those_that_vllm_lists() -> None:
    """To import the registry would take a minute."""
    code = "from importlib.util import find_spec; print(find_spec('vllm').origin)"
    done = subprocess.run([os.environ["VLLM_PYTHON"], "-c", code], capture_output=True, text=True, check=True)
    registry = (Path(done.stdout.strip()).parent / "model_executor/models/registry.py").read_text()
    own = listed(registry, "_TEXT_GENERATION_MODELS")
    others = listed(registry, "_TRANSFORMERS_SUPPORTED_MODELS")
    named = {model: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model] for model in (*EXACT, *SEPARATE, *ALONE)}
    assert {model for model, name in named.items() if name not in own | others} == set(NOT_LISTED)
    assert {model for model, name in named.items() if name in others - own} == set(BY_TRANSFORMERS)
