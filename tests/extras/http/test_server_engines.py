"""Runs with engines behind HTTP, up to the start of the servers."""

import json
import socket
import sys
from pathlib import Path

import pytest

from tailrace.api import load_config, train
from tailrace.config import LiveConfig
from tailrace.contracts.engine import Capabilities, EngineProcess, TokenCounter
from tailrace.drivers.assembly.open import _check_capabilities
from tailrace.drivers.engine.probes import SCORED
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.errors import ConfigError, WorkerDied
from tailrace.extras.http.vllm import PREFIX
from tailrace.model_folder import context_length

STAND_IN = f"""#!{sys.executable}
import pathlib, sys
if sys.argv[1] == "-c":
    print("plain")
else:
    pathlib.Path(__file__).with_name("words").write_text("\\n".join(sys.argv))
    sys.exit("no server")
"""
"""An interpreter whose environment has vLLM and SGLang, and whose servers end at once."""
TOOLS = Path(__file__).parents[3] / "examples" / "tools.toml"


@pytest.mark.parametrize(
    ("kind", "flag", "config", "max_prompt_tokens", "context"),
    [
        ("vllm", "--max-model-len", None, 20, PREFIX + SCORED + 1),
        ("vllm", "--max-model-len", None, None, None),
        ("vllm", "--max-model-len", TOOLS, 20, None),
        ("sglang", "--context-length", None, 20, 32),
    ],
)
def test_a_started_server_gets_the_context_of_the_longest_sequence(
    kind: str,
    flag: str,
    config: Path | None,
    max_prompt_tokens: int | None,
    context: int | None,
    config_path: Path,
    tmp_path: Path,
) -> None:
    """Of the probe at least; of the model's, where nothing bounds the prompts or an environment fills it."""
    changes = {"data.max_prompt_tokens": str(max_prompt_tokens)} if max_prompt_tokens else {}
    words, loaded = started(kind, changes, config or config_path, tmp_path)
    assert loaded.model
    assert words[words.index(flag) + 1] == str(context or context_length(loaded.model.path))


def started(kind: str, changes: dict[str, str], config: Path, folder: Path) -> tuple[list[str], LiveConfig]:
    """The command line of a server that a run starts, and the config of the run."""
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    kinds = {"engine.kind": kind, "engine.python": str(python), "weights.transport": "filesystem"}
    loaded = load_config(config, kinds | changes)
    with pytest.raises(WorkerDied, match="no server"):
        train(loaded, folder / "run")
    return (folder / "words").read_text().splitlines(), loaded


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_drafts_of_vllm_are_its_own_n_gram_speculation(
    drafts: str, config_path: Path, tmp_path: Path
) -> None:
    changes = {"engine.drafts": drafts, "engine.max_draft_tokens": "5"}
    words, _ = started("vllm", changes, config_path, tmp_path)
    found = [json.loads(words[words.index(each) + 1]) for each in words if each == "--speculative-config"]
    expected = {"method": "ngram", "num_speculative_tokens": 5}
    expected |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert found == ([expected] if drafts == "auto" else [])
    mode = "raw_logprobs" if drafts == "auto" else "processed_logprobs"
    assert words[words.index("--logprobs-mode") + 1] == mode


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engine.urls": '["http://127.0.0.1:1"]'}, "does not start the servers"),
        ({"sampling.temperature": "0.7"}, "vLLM 0.32 reports wrong log-probs with drafts"),
        ({"sampling.temperature": "1.0", "sampling.top_k": "9"}, "vLLM 0.32 .*, and with top_k it ends"),
    ],
)
def test_drafts_of_vllm_that_a_run_cannot_have_are_refused(
    changes: dict[str, str], problem: str, config_path: Path, tmp_path: Path
) -> None:
    changes |= {"engine.kind": "vllm", "engine.drafts": "auto"}
    with pytest.raises(ConfigError, match=problem) as refusal:
        train(load_config(config_path, changes), tmp_path / "run")
    assert (refusal.value.key, refusal.value.value) == ("engine.drafts", "auto")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_url_at_which_nothing_answers_is_named_with_its_key(
    kind: str, config_path: Path, tmp_path: Path
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        changes = {"engine.kind": kind, "engine.urls": f'["{url}"]', "weights.transport": "filesystem"}
        with pytest.raises(ConfigError, match=f"no {kind} server answers there .*ConnectError") as refusal:
            train(load_config(config_path, changes), tmp_path / "run")
    assert (refusal.value.key, refusal.value.value) == ("engine.urls", url)


def test_an_engine_that_cannot_say_which_weights_generated_a_token_is_warned_of(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never() -> EngineProcess:
        raise AssertionError

    engine = SupervisedEngine("engine-0", 1, never, TokenCounter())
    _check_capabilities(load_config(config_path), [engine])
    assert "warning: engine-0 cannot say which weights generated a token: " in capsys.readouterr().err
    engine.capabilities = Capabilities(exact_versions=True)
    _check_capabilities(load_config(config_path), [engine])
    assert capsys.readouterr().err == ""
    nucleus = load_config(config_path, {"run.eval_greedy": "false", "run.eval_top_p": "0.7"})
    with pytest.raises(
        ConfigError, match=r"run.eval_top_p = 0.7: engine-0 takes no top-p of a request's own"
    ):
        _check_capabilities(nucleus, [engine])
    engine.capabilities = Capabilities(exact_versions=True, top_p=True)
    _check_capabilities(nucleus, [engine])
