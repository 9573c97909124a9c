"""What a server of Tinker's API refuses, in words that name what would do instead."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker_cases import BASE, KEY, QUICKSTART, Server, clients_of, serving

pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore")]
IDS, TARGETS = [5, 6, 7], [6, 7, 8]


@pytest.fixture
def training(connect: Callable[[], Any]) -> Any:
    return connect().create_lora_training_client(base_model=BASE).result()


def refusal(training: Any, loss: str, ids: list[int] = IDS, config: Any = None, **inputs: list[Any]) -> str:
    """The message of a pass that the server refuses."""
    from tinker import types

    given = {"target_tokens": TARGETS, **inputs}
    data = [types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=given)]
    with pytest.raises(Exception) as raised:
        training.forward_backward(data, loss, config).result()
    return str(raised.value)


ONES = [1.0, 1.0, 1.0]
CASES = {
    "a loss that is not there": (
        ("other", IDS, None, {"advantages": ONES, "logprobs": ONES}),
        "loss_fn = 'other': this server has cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
    ),
    "stable_reinforce, which the server was not told to offer": (
        ("stable_reinforce", IDS, None, {"advantages": ONES, "logprobs": ONES}),
        "start the server with --own-stable-reinforce",
    ),
    "an input that is missing": (
        ("ppo", IDS, None, {"advantages": ONES}),
        "loss_fn_inputs: ppo needs 'logprobs'",
    ),
    "an input too much": (
        ("cross_entropy", IDS, None, {"weights": ONES, "advantages": ONES}),
        "cross_entropy of this server takes no 'advantages'",
    ),
    "a parameter that the loss does not have": (
        ("importance_sampling", IDS, {"beta": 0.1}, {"advantages": ONES, "logprobs": ONES}),
        "importance_sampling has no 'beta'; its parameters are: none",
    ),
    "targets that are not shifted inputs": (
        ("cross_entropy", [5, 9, 7], None, {"weights": ONES}),
        "target_tokens must be model_input shifted by one token",
    ),
    "weights of another length": (
        ("cross_entropy", IDS, None, {"weights": ONES[:2]}),
        "all must have the length of model_input, 3",
    ),
    "a weight that is not finite": (
        ("cross_entropy", IDS, None, {"weights": [1.0, float("nan"), 1.0]}),
        "a value of weights is not finite",
    ),
    "a token outside the vocabulary": (
        ("cross_entropy", [10**6, 6, 7], None, {"weights": ONES}),
        "a token is not in the vocabulary",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pass_that_cannot_be_computed_is_refused_by_name(training: Any, case: str) -> None:
    (loss, ids, config, inputs), message = CASES[case]
    assert message in refusal(training, loss, ids, config, **inputs)


def test_a_second_training_client_is_refused_while_the_first_is_alive(
    training: Any, connect: Callable[[], Any]
) -> None:
    with pytest.raises(Exception, match="another training client has the trainer of this server"):
        connect().create_lora_training_client(base_model=BASE).result()


def test_another_model_is_refused(connect: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=r"base_model = 'other': this server has 'quickstart'"):
        connect().create_lora_training_client(base_model="other").result()


def test_a_checkpoint_that_is_not_there_is_refused(connect: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match="this server has no such checkpoint"):
        connect().create_training_client_from_state("tinker://x/weights/none").result()


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_the_name_of_a_checkpoint_names_no_other_folder(training: Any, name: str) -> None:
    with pytest.raises(Exception, match="a name has letters, digits"):
        training.save_state(name or " ").result()


def test_a_request_without_a_key_or_from_another_host_is_refused(server: Server) -> None:
    route = f"{server.url}/api/v1/healthz"
    assert httpx.get(route).status_code == 401
    assert httpx.get(route, headers={"x-api-key": "tml-any"}).json() == {"status": "ok"}
    headers = {"x-api-key": "tml-any", "host": "elsewhere"}
    assert "ServiceClient(api_key=KEY)" in httpx.get(route, headers=headers).text
    headers["x-api-key"] = KEY
    assert httpx.get(route, headers=headers).json() == {"status": "ok"}


def test_an_older_sdk_is_told_what_to_install(server: Server) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.20.1"}
    reply = httpx.post(f"{server.url}/api/v1/create_session", json=body, headers={"x-api-key": "tml-any"})
    assert (reply.status_code, "pip install 'tinker>=0.38'" in reply.text) == (400, True)


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    with (
        serving(QUICKSTART, tmp_path, "--trainer.lora.rank", "4") as other,
        clients_of(other) as connect,
    ):
        client = connect()
        with pytest.raises(Exception, match=r"start the server with --trainer\.lora\.rank 16"):
            client.create_lora_training_client(base_model=BASE, rank=16).result()
        assert client.create_lora_training_client(base_model=BASE, rank=4).result().get_info().is_lora


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine.kind", "vllm"), "each request has its sampling"),
        (("--trainer.lora.publish", "adapter"), "the engines of this service take whole weights"),
        (("--trainer.restarts", "1"), "a new process would not get the calls of clients again"),
        (("--trainer.learning", "1"), "trainer.learning"),
    ],
)
def test_settings_that_a_service_cannot_have_are_refused(options: tuple[str, str], message: str) -> None:
    words = [sys.executable, "-m", "tailrace.cli", "serve", str(QUICKSTART), "--tinker", *options]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_a_state_folder_with_names_of_others_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_text("mine")
    words = [sys.executable, "-m", "tailrace.cli", "serve", str(QUICKSTART), "--tinker"]
    done = subprocess.run([*words, "--state-folder", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "what tailrace did not write there: base; choose" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["base", "model.safetensors"]
