"""Which models the embedded engine refuses, in the user's words, before torch is loaded."""

import json
import subprocess
import sys

import pytest

from tailrace.drivers.engine.native.support import check_model
from tailrace.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"model_type": "gpt2"}, r"model type 'gpt2' \(only llama, mistral, qwen2, qwen3\)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        ({"model_type": "qwen2", "quantization_config": {}}, "quantised weights"),
    ],
)
def test_a_model_that_the_engine_cannot_compute_is_refused(tmp_path, config, feature):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"the embedded engine does not support {feature}; choose another"):
        check_model(tmp_path)


def test_supported_models_pass(models):
    for folder, _ in models.values():
        check_model(folder)


def test_the_check_imports_no_torch():
    code = "import sys, tailrace.drivers.engine.native.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
