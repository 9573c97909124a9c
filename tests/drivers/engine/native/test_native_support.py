"""Which models the embedded engine serves by its own forward pass, in words, before torch is loaded."""

import json
import subprocess
import sys

import pytest

from tailrace.drivers.engine.native.support import not_fused
from tailrace.model_folder import check_files


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ],
)
def test_what_its_own_forward_pass_does_not_compute_is_named(tmp_path, config, feature):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not_fused(tmp_path) == feature


def test_supported_models_pass(models):
    for folder, _ in models.values():
        check_files(folder)
        assert not_fused(folder) == ""


def test_the_check_imports_no_torch():
    code = "import sys, tailrace.drivers.engine.native.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
