"""Tinker's messages, as the released SDK defines them, and what they are here.

Passes and samples travel as protocol buffers, everything else as JSON.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tailrace.algo.base import TokenLossName
from tailrace.drivers.trainer.batch import AdamStep, LossDatum, LossOutput, TokenLoss
from tailrace.errors import TailraceError
from tailrace.extras.serve.formats import SamplingFields, first_defect
from tailrace.types import Sample, SamplingParams

OF_RATIO = ("advantages", "logprobs")
"""`loss_fn_inputs` of a loss beside target_tokens."""
RATIO_MASK = "sequence_ratio_mask"
INPUTS: Mapping[str, tuple[str, ...]] = {"cross_entropy": ("weights",), "gspo": (*OF_RATIO, RATIO_MASK)}
"""`loss_fn_inputs` of the losses that take others."""
UNKNOWN = ["topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"]
UNKNOWN += ["prompt_logprobs_last_n"]
ADAM = {"learning_rate": (0, 1), "beta1": (0, 1 - 1e-9), "beta2": (0, 1 - 1e-9), "eps": (1e-30, 1e9)}
ADAM |= {"weight_decay": (0, 1), "grad_clip_norm": (0, 1e30)}
"""Bounds of a step's parameters. An epsilon that float32 rounds to 0 divides 0 by 0."""
MAX_DATA = 4096
"""Sequences of a pass; the SDK sends 1,024."""
DTYPES = {pb.DTYPE_INT64: np.dtype(np.int64), pb.DTYPE_FLOAT32: np.dtype(np.float32)}
CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
CONFIGS: Mapping[str, Mapping[str, str]] = {
    "ppo": CLIPS,
    "cispo": CLIPS,
    "dro": {"beta": "beta"},
    "gspo": CLIPS,
    "stable_reinforce": {"clip_high_threshold": "clip_high", "kl_coeff": "beta"},
}
"""Keys of `loss_fn_config`, and our names of them."""
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "gspo": {"clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4},  # 2507.18071, 5.1
    "stable_reinforce": {"clip_high": 5.0, "beta": 0.01},
}
"""Parameters of the losses that have other defaults than `TokenLoss`."""
NOT_PUBLIC = (
    "the formula of Tinker's stable_reinforce is not public; start the server with --own-stable-reinforce "
    "for a form of tailrace's own (docs/how-to/serve.md), or choose another loss: loss_fn=ppo"
)


class NotOffered(TailraceError):
    """A client asks for what this server does not do. The message says what, and what would do instead."""


class Pass(NamedTuple):
    """A request for a forward pass, or for a forward and backward pass."""

    data: list[LossDatum]
    loss: TokenLoss
    with_gradient: bool


def adam_step(params: Any) -> AdamStep:
    """Return the parameters of a step. Raises NotOffered that names the first wrong one."""
    if not isinstance(params, types.AdamParams):
        raise NotOffered(f"optim_params: this server takes AdamParams, which have no type ({params.type!r})")
    for name, (low, high) in ADAM.items():
        if not low <= (value := getattr(params, name)) <= high:
            raise NotOffered(f"optim_params.{name} = {value}: it must be {low:g} to {high:g}")
    betas = (params.beta1, params.beta2)
    return AdamStep(params.learning_rate, betas, params.eps, params.weight_decay, params.grad_clip_norm)


def _message(body: bytes) -> Any:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as why:
        raise NotOffered(f"this is no ForwardBackwardRequest of the released SDK ({why})") from why
    return message


def head_of_pass(body: bytes) -> tuple[str, int]:
    """Return the model_id and the seq_id of a pass. Raises NotOffered if the body is none."""
    message = _message(body)
    return message.model_id, message.seq_id


def read_pass(body: bytes, *, vocabulary: int, context: int, own_stable_reinforce: bool) -> Pass:
    """Return what a pass asks for. Raises NotOffered if it cannot be computed."""
    message = _message(body)
    name = message.loss_fn
    if name not in get_args(TokenLossName):
        has = ", ".join(get_args(TokenLossName))
        raise NotOffered(
            f"loss_fn = {name!r}: this server has {has}; others can be computed by the client, with "
            "forward_backward_custom"
        )
    if name == "stable_reinforce" and not own_stable_reinforce:
        raise NotOffered(f"loss_fn = {name!r}: {NOT_PUBLIC}")
    known = CONFIGS.get(name, {})
    typed = message.loss_fn_config_v2
    given = {key: value.number for key, value in typed.items()} or dict(message.loss_fn_config)
    if unknown := sorted(given.keys() - known.keys()):
        has = ", ".join(known) or "none"
        raise NotOffered(f"loss_fn_config: {name} has no {unknown[0]!r}; its parameters are: {has}")
    for key, value in given.items():
        if (key in typed and typed[key].WhichOneof("value") != "number") or not 0 <= value < math.inf:
            raise NotOffered(f"loss_fn_config: {key} must be a number, at least 0 and finite")
    chosen = {known[key]: value for key, value in given.items()}
    loss = TokenLoss(name, **{**DEFAULTS.get(name, {}), **chosen})
    session_id = message.model_id.partition(":")[0]
    if not 1 <= len(message.data) <= MAX_DATA:
        raise NotOffered(f"data: {len(message.data)} sequences; there must be 1 to {MAX_DATA:,}")
    try:
        data = [_datum(each, name, vocabulary, context, session_id) for each in message.data]
    except NotOffered as why:
        raise NotOffered(f"data: {why}") from why
    return Pass(data, loss, not message.forward_only)


def _datum(datum: Any, loss: str, vocabulary: int, context: int, session_id: str) -> LossDatum:
    int32 = np.dtype(np.int32)
    chunks = [_numbers("model_input", _tokens(chunk), int32, context) for chunk in datum.model_input]
    ids, inputs = [id for chunk in chunks for id in chunk], INPUTS.get(loss, OF_RATIO)
    found = {key: _values(key, tensor, context) for key, tensor in datum.loss_fn_inputs.items()}
    if missing := [key for key in ("target_tokens", *inputs) if key not in found]:
        raise NotOffered(f"loss_fn_inputs: {loss} needs {missing[0]!r}")
    if extra := sorted(found.keys() - {"target_tokens", *inputs}):
        raise NotOffered(f"loss_fn_inputs: {loss} of this server takes no {extra[0]!r}")
    targets = found["target_tokens"]
    if not ids or {len(each) for each in found.values()} != {len(ids)}:
        lengths = ", ".join(f"{key} {len(each)}" for key, each in found.items())
        raise NotOffered(f"all must have the length of model_input, {len(ids)}, and at least 1: {lengths}")
    _sampled("model_input_spans", datum.model_input_spans, len(ids), session_id)
    sampled = _sampled("loss_fn_input_spans", datum.loss_fn_input_spans, len(ids), session_id)
    advantages, *old = (found[key] for key in inputs)
    if not all(map(math.isfinite, (value for each in (advantages, *old) for value in each))):
        raise NotOffered(f"a value of {' or '.join(inputs)} is not finite")
    if loss == "stable_reinforce":
        if not any(sampled):
            raise NotOffered(f"{loss} needs Datum.with_provenance: spans of sampled tokens")
        if any(each for each, mark in zip(advantages, sampled, strict=True) if not mark):
            raise NotOffered(f"{loss} takes advantages of sampled tokens only (loss_fn_input_spans)")
        old.append(sampled)
    if loss == "gspo" and not any(old[1]):
        raise NotOffered(f"loss_fn_inputs: {RATIO_MASK} marks no token")
    whole = [*ids, targets[-1]]
    made = LossDatum(whole, advantages, *old)
    wrong = [a != b for a, b in zip(ids[1:], targets[:-1], strict=True)]
    if any(each and (counts or loss == "dro") for each, counts in zip(wrong, made.in_loss, strict=False)):
        raise NotOffered(
            "target_tokens must be model_input shifted by one token, then one more token; only a target that "
            "is not in the loss may be another"
        )
    if not all(0 <= id < vocabulary for id in (*whole, *targets)):
        raise NotOffered(f"a token is not in the vocabulary of {vocabulary} tokens")
    if len(ids) > context:
        raise NotOffered(f"{len(ids)} tokens; the context has {context}")
    return made


def _sampled(field: str, spans: Any, num_tokens: int, session_id: str) -> list[float]:
    """Where the tokens of a vector come from: [num_tokens], 1 for a sampled one; without spans empty. They
    name sequences that this session sampled, and their lengths add up to the vector's."""
    marks: list[float] = []
    for span in spans:
        kind = span.WhichOneof("span")
        run = getattr(span, kind or "prompt_tokens")
        if not run.sequence_id.startswith(f"{session_id}:sample:"):
            raise NotOffered(f"{field}: {run.sequence_id!r} is no sequence that this session sampled")
        if run.length > num_tokens - len(marks):
            raise NotOffered(f"{field}: the spans are longer than the {num_tokens} tokens")
        marks += [float(kind == "sampled_tokens")] * run.length
    if spans and len(marks) < num_tokens:
        raise NotOffered(f"{field}: the spans have {len(marks)} of the {num_tokens} tokens")
    return marks


def _tokens(chunk: Any) -> bytes:
    if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
        raise NotOffered(f"model_input: this server takes text, not {kind}")
    return bytes(chunk.encoded_text.tokens)


def _values(key: str, tensor: Any, context: int) -> list[Any]:
    """The values of a vector; those of target_tokens are integers."""
    if len(tensor.shape) > 1 or tensor.WhichOneof("encoding") == "sparse_csr":
        raise NotOffered(f"loss_fn_inputs: {key}: this server takes one value for each token")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or (key == "target_tokens" and tensor.dtype != pb.DTYPE_INT64):
        takes = "int64" if key == "target_tokens" else "float32 and int64"
        raise NotOffered(f"loss_fn_inputs: {key}: this server takes {takes}, not DType {tensor.dtype}")
    values = _numbers(f"loss_fn_inputs: {key}", tensor.dense, dtype, context)
    return values if key == "target_tokens" else [float(value) for value in values]


def _numbers(field: str, data: bytes, dtype: Any, context: int) -> list[Any]:
    """The numbers of a vector that is not longer than the context."""
    if len(data) % dtype.itemsize:
        raise NotOffered(f"{field}: {len(data)} bytes are no whole number of {dtype.name}")
    if len(data) > context * dtype.itemsize:
        raise NotOffered(f"{field}: {len(data) // dtype.itemsize} tokens; the context has {context}")
    found: list[Any] = np.frombuffer(data, dtype).tolist()
    return found


def pass_bytes(asked: Pass, outputs: Sequence[LossOutput]) -> bytes:
    """Return the reply to a pass: log-probs, and under cross_entropy the loss, of each token."""
    fields = {"logprobs": [each.logprobs for each in outputs]}
    if asked.loss.name == "cross_entropy":
        fields["elementwise_loss"] = [each.losses for each in outputs]
    record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=len(outputs))
    for name, rows in fields.items():
        ends = np.cumsum([0, *map(len, rows)], dtype=np.int64) * np.dtype(np.float32).itemsize
        record.fields[name].CopyFrom(
            pb.BatchedTensor(
                data=np.concatenate([np.asarray(row, np.float32) for row in rows]).tobytes(),
                offsets=ends.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
            )
        )
    total = float(np.sum([loss for each in outputs for loss in each.losses]))  # also if it is not finite
    reply = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": total}
    )
    return bytes(reply.SerializeToString())


def sampling_of(
    request: types.SampleRequest, *, vocabulary: int, context: int, own_stable_reinforce: bool
) -> tuple[list[int], SamplingParams, bool]:
    """Return the prompt of a request, how it is sampled, and whether greedily. Raises NotOffered if this
    server cannot."""
    for key in UNKNOWN:
        if getattr(request, key):
            raise NotOffered(f"{key}: this server returns the log-probs of the tokens only")
    if request.record_stability_info and not own_stable_reinforce:  # of use for that loss only
        raise NotOffered(f"record_stability_info: {NOT_PUBLIC}")
    try:
        ids = request.prompt.to_ints()
    except ValueError:
        raise NotOffered("prompt: this server takes text only") from None
    if not all(0 <= id < vocabulary for id in ids):
        raise NotOffered(f"prompt: a token is not in the vocabulary of {vocabulary} tokens")
    params = request.sampling_params
    room = context - len(ids)
    if not ids or room < 1:
        raise NotOffered(f"the prompt has {len(ids)} tokens; it must have 1 to {context - 1}")
    stop: Sequence[Any] = (params.stop,) if isinstance(params.stop, str) else params.stop or ()
    given = {
        **params.model_dump(include={"temperature", "top_p", "top_k", "seed"}),
        "stop_token_ids": [each for each in stop if isinstance(each, int)],
        "stop": [each for each in stop if isinstance(each, str)],
        "ignore_eos": params.stop is not None and not stop,
    }
    try:
        fields = SamplingFields.model_validate(given)
    except ValidationError as why:
        raise NotOffered(f"sampling_params.{first_defect(why)}") from None
    num_tokens = room if params.max_tokens is None else max(1, params.max_tokens)
    return ids, fields.params(min(room, num_tokens)), fields.greedy


def sample_bytes(samples: Sequence[Sample], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Return the reply to a request for samples.

    Args:
        prompt_logprobs: [tokens of the prompt - 1], of its second token and those after it.
    """
    reply = pb.SampleResponse()
    for sample in samples:
        reply.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.completion_ids, np.int32).tobytes(),
            logprobs=np.asarray(sample.behavior_logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        reply.prompt_logprobs = np.asarray([math.nan, *prompt_logprobs], np.float32).tobytes()
    return bytes(reply.SerializeToString())
