"""Which models the embedded engine serves by its own forward pass, in words, before torch is loaded."""

import json
import subprocess
import sys

import pytest

from tailrace.drivers.engine.native.support import check_model, not_fused
from tailrace.errors import ConfigError


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


def test_quantised_weights_are_refused(tmp_path):
    config = {"model_type": "qwen2", "quantization_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="the embedded engine does not support quantised weights; choose"):
        check_model(tmp_path)


def test_supported_models_pass(models):
    for folder, _ in models.values():
        check_model(folder)
        assert not_fused(folder) == ""


def test_the_check_imports_no_torch():
    code = "import sys, tailrace.drivers.engine.native.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
