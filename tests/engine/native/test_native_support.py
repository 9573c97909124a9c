"""What the engine refuses, in the user's words, before torch is loaded."""

import json
import subprocess
import sys

import pytest

from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.engine.native.engine import NativeEngine
from tailrace.engine.native.support import check_model
from tailrace.errors import ConfigError


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.*there is no such folder; name a Hugging Face model"):
        check_model(tmp_path / "absent")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        check_model(tmp_path)


def test_a_config_that_is_not_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "gpt2"}, "cannot run model type 'gpt2'; choose a model of type llama, mistral"),
        ({"model_type": "mistral", "sliding_window": 4096}, "does not support sliding-window attention"),
        ({"model_type": "llama", "mlp_bias": True}, "does not support mlp_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "does not support attention_bias"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "does not support activation 'gelu'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic"}},
            "does not support rope type 'dynamic'",
        ),
        ({"model_type": "qwen2", "quantization_config": {}}, "does not support quantised weights"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, config, problem):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem):
        check_model(tmp_path)


def test_supported_models_pass(models):
    for folder, _ in models.values():
        check_model(folder)


def test_a_folder_without_weights_is_named(tmp_path, models):
    (tmp_path / "config.json").write_text((models["qwen2"][0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="the folder has no safetensors weights"):
        NativeEngine.from_pretrained(tmp_path, EngineSettings(), SamplingSettings(max_completion_tokens=1))


def test_the_check_imports_no_torch():
    code = "import sys, tailrace.engine.native.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
