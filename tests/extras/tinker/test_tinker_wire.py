"""Messages of Tinker's API that say what no message of the SDK says."""

import json
import re
from collections.abc import Sequence
from math import inf, nan
from typing import Any

import httpx
import numpy as np
import pytest
from tinker_cases import BASE, Server

pytest.importorskip("tinker.types")  # a folder of the tests is named tinker, too

from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from tailrace.extras.tinker.wire import NotOffered, adam_step, read_pass, sampling_of

pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore")]


def message(**changes: Any) -> Any:
    """A pass of one sequence. `changes`: of its vectors, as (dtype, values or bytes), and of the tokens."""
    asked = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = asked.data.add()
    tokens = changes.pop("tokens", np.asarray([5, 6, 7], np.int32).tobytes())
    datum.model_input.add().encoded_text.tokens = tokens
    given = {"target_tokens": (pb.DTYPE_INT64, np.asarray([6, 7, 8], np.int64)), **changes}
    for name, (dtype, values) in {"weights": (pb.DTYPE_FLOAT32, np.ones(3, np.float32)), **given}.items():
        dense = values if isinstance(values, bytes) else values.tobytes()
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=dense, dtype=dtype, shape=[3]))
    return asked


def read(asked: Any, context: int = 100, own: bool = True) -> Any:
    return read_pass(asked.SerializeToString(), vocabulary=10, context=context, own_stable_reinforce=own)


def of_sdk(loss: str, spans: Any = None, targets: Sequence[int] = (6, 7, 8), **inputs: list[float]) -> Any:
    """A pass as the SDK encodes it. `spans`: of the three targets."""
    given = {"advantages": [0.0, 1.0, 1.0], "logprobs": [0.0, -1.0, -1.0], **inputs}
    datum = types.Datum(types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": list(targets), **given})
    if spans:
        of_input = types.PromptProvenanceSpan(sequence_id=spans[0].sequence_id, length=3)
        datum = datum.with_provenance(model_input=[of_input], loss_fn_inputs=spans)
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput([datum], loss), model_id="s:train:0", seq_id=1
    )
    return forward_backward_request_to_proto(asked)


def spans_of(id: str, *lengths: int) -> list[Any]:
    """A run of the prompt, then of sampled tokens."""
    prompt, sampled = lengths
    return [
        types.PromptProvenanceSpan(sequence_id=id, offset=1, length=prompt),
        types.SampledProvenanceSpan(sequence_id=id, length=sampled),
    ]


def test_gspo_has_the_mask_of_its_ratio_and_the_papers_clips() -> None:
    found = read(of_sdk("gspo", sequence_ratio_mask=[0.0, 1.0, 1.0]))
    assert (found.data[0].sampled, found.loss.clip_low, found.loss.clip_high) == (
        [0.0, 1.0, 1.0],
        0.9997,
        1.0004,
    )


def test_provenance_says_which_tokens_were_sampled() -> None:
    found = read(of_sdk("stable_reinforce", spans_of("s:sample:0:7:1", 1, 2)))
    assert found.data[0].sampled == [0.0, 1.0, 1.0]
    assert (found.loss.clip_high, found.loss.beta) == (5.0, 0.01)
    others = read(of_sdk("importance_sampling", spans_of("s:sample:0:7:1", 1, 2)))
    assert others.data[0].sampled == []


def test_a_target_that_is_not_in_the_loss_may_be_another_token() -> None:
    """rl_loop.py of tinker-cookbook has zeros in place of the prompt."""
    assert read(of_sdk("ppo", targets=[0, 7, 8])).data[0].ids == [5, 6, 7, 8]
    for loss, inputs in (("dro", {}), ("gspo", {"sequence_ratio_mask": [1.0, 1.0, 1.0]})):
        with pytest.raises(NotOffered, match="only a target that is not in the loss may be another"):
            read(of_sdk(loss, targets=[0, 7, 8], **inputs))


def without(asked: Any, name: str) -> Any:
    asked.data[0].loss_fn_inputs.pop(name)
    return asked


def spans_shortened(asked: Any) -> Any:
    asked.data[0].loss_fn_input_spans[1].sampled_tokens.length = 1
    return asked


OWN = spans_of("s:sample:0:7:1", 1, 2)
WRONG_PASSES: dict[str, tuple[Any, str]] = {
    "gspo without a mask": (of_sdk("gspo"), "loss_fn_inputs: gspo needs 'sequence_ratio_mask'"),
    "gspo without log-probs": (
        without(of_sdk("gspo", sequence_ratio_mask=[1.0] * 3), "logprobs"),
        "loss_fn_inputs: gspo needs 'logprobs'",
    ),
    "a mask of no token": (
        of_sdk("gspo", sequence_ratio_mask=[0.0] * 3),
        "sequence_ratio_mask marks no token",
    ),
    "a mask for another loss": (
        of_sdk("ppo", sequence_ratio_mask=[1.0] * 3),
        "ppo of this server takes no 'sequence_ratio_mask'",
    ),
    "no provenance": (of_sdk("stable_reinforce"), "stable_reinforce needs Datum.with_provenance"),
    "an advantage in the prompt": (
        of_sdk("stable_reinforce", OWN, advantages=[1.0, 1.0, 1.0]),
        "stable_reinforce takes advantages of sampled tokens only",
    ),
    "a sequence of another session": (
        of_sdk("ppo", spans_of("other:sample:0:7:1", 1, 2)),
        "model_input_spans: 'other:sample:0:7:1' is no sequence that this session sampled",
    ),
    "spans too short": (
        spans_shortened(of_sdk("ppo", OWN)),
        "loss_fn_input_spans: the spans have 2 of the 3 tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG_PASSES)
def test_a_pass_that_says_too_little_of_its_tokens_is_refused_by_name(case: str) -> None:
    asked, why = WRONG_PASSES[case]
    with pytest.raises(NotOffered, match=re.escape(why)):
        read(asked)


def test_stable_reinforce_is_refused_unless_the_server_offers_its_own() -> None:
    why = (
        "the formula of Tinker's stable_reinforce is not public; start the server with --own-stable-reinforce"
    )
    with pytest.raises(NotOffered, match=f"loss_fn = 'stable_reinforce': {why}"):
        read(of_sdk("stable_reinforce", OWN), own=False)
    asked = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1]),
        sampling_params=types.SamplingParams(),
        record_stability_info=True,
    )
    with pytest.raises(NotOffered, match=f"record_stability_info: {why}"):
        sampling_of(asked, vocabulary=10, context=100, own_stable_reinforce=False)
    assert sampling_of(asked, vocabulary=10, context=100, own_stable_reinforce=True)[0] == [1]


def test_a_pass_is_read() -> None:
    ids = message(weights=(pb.DTYPE_INT64, np.asarray([0, 1, 1])))
    assert (read(ids).data[0].ids, read(ids).data[0].advantages) == ([5, 6, 7, 8], [0.0, 1.0, 1.0])
    old = message()
    old.loss_fn = "ppo"
    old.loss_fn_config["clip_high_threshold"] = 1.5
    old.data[0].loss_fn_inputs["advantages"].CopyFrom(old.data[0].loss_fn_inputs.pop("weights"))
    old.data[0].loss_fn_inputs["logprobs"].CopyFrom(old.data[0].loss_fn_inputs["advantages"])
    assert read(old).loss.clip_high == 1.5


FLOATS = np.ones(3, np.float32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "int32": ({"weights": (3, np.ones(3, np.int32))}, "weights: this server takes float32 and int64"),
    "bfloat16": ({"weights": (4, b"\0" * 6)}, "weights: this server takes float32 and int64"),
    "no type": ({"weights": (0, FLOATS)}, "weights: this server takes float32 and int64"),
    "targets that are floats": ({"target_tokens": (1, FLOATS)}, "target_tokens: this server takes int64"),
    "bytes missing": ({"weights": (1, b"\0" * 11)}, "weights: 11 bytes are no whole number of float32"),
    "bytes of tokens missing": ({"tokens": b"\0" * 11}, "model_input: 11 bytes are no whole number of int32"),
    "tokens too many": ({"tokens": b"\0" * 4004}, "model_input: 1001 tokens; the context has 100"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vector_that_is_not_what_it_seems_is_refused_by_name(case: str) -> None:
    changes, words = WRONG[case]
    with pytest.raises(NotOffered, match=words):
        read(message(**changes))


def test_a_pass_without_data_and_a_config_that_is_no_number_are_refused_by_name() -> None:
    with pytest.raises(NotOffered, match="data: 0 sequences"):
        read(pb.ForwardBackwardRequest(loss_fn="cross_entropy"))
    for given in ({"text": "0.2"}, {}, *({"number": number} for number in (nan, inf, -1.0))):
        asked = message()
        asked.loss_fn = "dro"
        asked.loss_fn_config_v2["beta"].CopyFrom(pb.LossConfigValue(**given))
        with pytest.raises(NotOffered, match="loss_fn_config: beta must be a number, at least 0 and finite"):
            read(asked)


WRONG_STEPS = [(name, value) for name in ("learning_rate", "weight_decay") for value in (nan, inf, -1e-9, 2)]
WRONG_STEPS += [(name, value) for name in ("beta1", "beta2") for value in (nan, -0.1, 1.0)]
WRONG_STEPS += [("eps", value) for value in (nan, inf, -1.0, 0.0, 1e-60)]
WRONG_STEPS += [("grad_clip_norm", value) for value in (nan, inf, -1.0)]


@pytest.mark.parametrize(("name", "value"), WRONG_STEPS)
def test_a_step_whose_numbers_are_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(NotOffered, match=rf"optim_params\.{name} = "):
        adam_step(types.AdamParams(**{name: value}))
    assert adam_step(types.AdamParams()).eps == 1e-12


WRONG_SAMPLING = [("temperature", nan), ("temperature", -1), ("top_p", 0), ("top_p", nan), ("top_k", 10**30)]
WRONG_SAMPLING += [
    ("seed", 10**30),
    ("stop", [-1]),
    ("stop", [10**30]),
    ("stop", [""]),
    ("stop", ["x"] * 100),
]


@pytest.mark.parametrize(("name", "value"), WRONG_SAMPLING)
def test_sampling_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    params = types.SamplingParams(**{name: value})
    asked = types.SampleRequest(prompt=types.ModelInput.from_ints([1]), sampling_params=params)
    with pytest.raises(NotOffered, match=rf"sampling_params\.{name}"):
        sampling_of(asked, vocabulary=10, context=100, own_stable_reinforce=False)


@pytest.fixture
def http(server: Server) -> Any:
    headers = {"x-api-key": "tml-any", "content-type": "application/json"}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def session(http: Any) -> Any:
    """The id of a session that has the trainer."""
    asked = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    id = http.post("/create_session", json=asked).json()["session_id"]
    made = http.post("/create_model", json={"session_id": id, "model_seq_id": 0, "base_model": BASE}).json()
    while (
        http.post("/retrieve_future", json={"request_id": made["request_id"]}).json()["type"] == "try_again"
    ):
        pass
    yield id
    http.post(f"/sessions/{id}/finish")


@pytest.mark.parametrize("id", ["evil", "../evil", "{outside}", "a\0b", "{session}:train:0/../../evil"])
@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler", "load_weights", "get_info"])
def test_the_id_of_another_model_is_refused_and_touches_nothing(
    http: Any, session: str, server: Server, id: str, route: str
) -> None:
    precious = server.folder.parent / "evil" / "weights" / "precious"
    precious.mkdir(parents=True, exist_ok=True)
    (precious / "file").write_text("precious")
    before = sorted(server.folder.parent.rglob("*"))
    model = id.format(outside=server.folder.parent / "evil", session=session)
    more: dict[str, dict[str, object]] = {
        "get_info": {},
        "load_weights": {"path": f"tinker://{session}:train:0/weights/x", "optimizer": True, "seq_id": 10},
    }
    body = {"model_id": model, **more.get(route, {"path": "precious", "overwrite": True, "seq_id": 10})}
    if route == "save_weights_for_sampler":
        del body["overwrite"]
    reply = http.post(f"/{route}", json=body)
    assert (reply.status_code, "does not have the trainer" in reply.text) == (404, True), reply.text
    if route == "load_weights":
        reply = http.post(f"/{route}", json=body | {"session_id": session, "model_seq_id": 1})
        assert (reply.status_code, "model_id: " in reply.text) == (400, True), reply.text
    assert sorted(server.folder.parent.rglob("*")) == before


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "null"])
def test_a_learning_rate_that_is_none_is_refused_at_the_door(http: Any, session: str, value: str) -> None:
    body = f'{{"model_id": "{session}:train:0", "seq_id": 10, "adam_params": {{"learning_rate": {value}}}}}'
    reply = http.post("/optim_step", content=body)
    assert (reply.status_code, "learning_rate" in reply.text) == (400, True), reply.text
    assert http.post("/optim_step", content=body.replace(value, "1e-3")).status_code == 200


def test_a_body_that_no_prompt_fills_is_refused_before_it_is_parsed(http: Any, session: str) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5] * 5_000_000}]}
    body = json.dumps({"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "prompt": prompt})
    assert http.post("/asample", content=body).status_code == 413


@pytest.mark.parametrize("version", ["9" * 5000 + ".1", "²", "", "x.y"])
def test_a_version_that_is_none_is_refused(http: Any, version: str) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": version}
    reply = http.post("/create_session", json=body)
    assert (reply.status_code, "pip install 'tinker>=0.38'" in reply.text) == (400, True)


def test_the_name_of_a_checkpoint_may_be_of_any_length_and_is_refused(http: Any, session: str) -> None:
    body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE}
    for path in (f"tinker://{'a' * 5000}/sampler_weights/x", "tinker://a\0/sampler_weights/x"):
        reply = http.post("/create_sampling_session", json=body | {"model_path": path})
        assert (reply.status_code, "no such checkpoint" in reply.text) == (400, True), reply.text
