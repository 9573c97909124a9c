"""Pauses, aborts and new weights under way."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from serve_cases import generated, restore, update

from helpers.served import TOKEN
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.weights import Link
from tailrace.drivers.weights.process_group import ProcessGroupSender
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.types import SamplingParams

PROMPT = [3, 4, 5, 6]
LINK = (("served",), 1, 1)


@pytest.fixture(autouse=True)
def _as_before(http):
    yield
    restore(http)


class Stream:
    """A stream of tokens that is read in a thread."""

    def __init__(self, url, num_tokens, seed=0):
        self.ids, self.spans, self.finish = [], [], None
        self.begun = threading.Event()
        self._url, self._sampling = url, {"max_tokens": num_tokens, "seed": seed, "logprobs": 1}
        self.logprobs = []

    def read(self):
        body = {"token_ids": PROMPT, "stream": True, "sampling_params": self._sampling}
        with httpx.stream("POST", f"{self._url}/inference/v1/generate", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.ids += choice["token_ids"]
                self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                self.begun.set()
                if choice["finish_reason"]:
                    self.finish, self.spans = choice["finish_reason"], choice["weight_versions"]
        return self


def num_submitted(http):
    """Prompt tokens that the engine was given since the start."""
    lines = http.get("/metrics").text.splitlines()
    return float(*(line.split()[-1] for line in lines if line.startswith("vllm:prompt_tokens_total{")))


@contextmanager
def under_way(http, *streams, clear_cache="false"):
    """A block in which the server is paused and each stream has some of its tokens.

    The engine runs between two requests only, so no stream ends meanwhile, however slow their readers are.
    Afterwards the server goes on, and the streams end.
    """
    pause = {"mode": "keep", "clear_cache": clear_cache}
    assert http.post("/pause", params=pause).status_code == 200
    expected = num_submitted(http) + len(PROMPT) * len(streams)
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        while num_submitted(http) < expected:
            time.sleep(0.01)
        while not all(stream.begun.wait(0.5) for stream in streams):
            assert http.post("/resume").status_code == 200
            assert http.post("/pause", params=pause).status_code == 200
        yield
        assert http.post("/resume").status_code == 200
        for each in reading:
            each.result(60)


def test_an_update_in_flight_ends_nothing_and_each_token_has_its_version(url, http):
    streams = [Stream(url, 300, seed) for seed in range(8)]
    with under_way(http, *streams):
        assert http.get("/is_paused").json() == {"is_paused": True}
        update(http, {"location": "new/model.safetensors"}, "7")
    assert http.get("/weight_info").json() == {"weight_version": "7"}
    for stream in streams:
        assert (stream.finish, len(stream.ids), len(stream.logprobs)) == ("length", 300, 300)
        old, new = stream.spans
        assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "7", 300)
        assert 0 < old["end"] == new["start"] < 300


@pytest.mark.parametrize(("clear", "kv"), [("false", "keep"), ("true", "recompute")])
def test_the_cache_is_kept_or_recomputed_as_the_pause_says(url, http, folder, native, clear, kv):
    stream = Stream(url, 300)
    with under_way(http, stream, clear_cache=clear):
        update(http, {"location": "new"}, "7")
    native.submit(GenerationRequest("x", PROMPT, (), 0, sampling=SamplingParams(300)))
    for _ in range(stream.spans[0]["end"]):
        native.step()
    (first,) = native.load(load_file(folder / "weights/new/model.safetensors"), version=1, kv=kv)
    rest = []
    while not native.idle:
        rest += native.step()
    native.load(load_file(folder / "weights/old/model.safetensors"), version=0, kv="recompute")
    assert stream.ids == first.ids + rest[0].ids
    expected = first.behavior_logprobs + rest[0].behavior_logprobs
    assert stream.logprobs == pytest.approx(expected, abs=1e-4)


def test_pipelinerls_update_needs_no_pause(url, http, native):
    stream = Stream(url, 500)
    with under_way(http, stream):
        assert http.post("/resume").status_code == 200
        reply = http.post("/request_weight_update", json={"version": 9, "location": "new"})
        assert reply.json() == {"status": "ok"}
    assert [span["version"] for span in stream.spans] == ["default", "9"]


TRAINER = """
import sys, threading, httpx, torch.distributed as dist
from safetensors.torch import load_file
url, token, file, port = sys.argv[1:]
http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60)
def post(route, body, meanwhile):
    replies = []
    asking = threading.Thread(target=lambda: replies.append(http.post(route, json=body)))
    asking.start()
    meanwhile()
    asking.join()
    print(replies[0].text)
tensors = {name: tensor.contiguous() for name, tensor in load_file(file).items()}
group = {"master_address": "127.0.0.1", "master_port": int(port), "rank_offset": 1, "world_size": 2}
post("/init_process_group", group, lambda: dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2))
infos = [{"name": n, "shape": list(t.shape), "dtype": str(t.dtype)} for n, t in tensors.items()]
for version in (3, 4):
    body = {"version": version, "parameters_info": infos}
    post("/request_weight_update", body, lambda: [dist.broadcast(t, 0) for t in tensors.values()])
"""
"""A trainer that has torch and nothing of this package."""


def test_a_trainer_without_this_package_makes_the_group_and_sends_weights(url, http, folder, native):
    file = folder / "weights/new/model.safetensors"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", TRAINER, url, TOKEN, str(file), str(port)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ['{"status":"ok"}'] * 3, done.stderr
    native.load(load_file(file), version=4, kv="recompute")
    (expected,) = generated(native, [PROMPT], 20, greedy=True)
    native.load(load_file(folder / "weights/old/model.safetensors"), version=0, kv="recompute")
    body = {"messages": [{"role": "user", "content": ""}], "prompt_token_ids": PROMPT, "logprobs": True}
    body |= {"max_tokens": 20, "temperature": 0, "return_token_ids": True, "return_weight_versions": True}
    reply = http.post("/v1/chat/completions", json=body).json()
    (choice,) = reply["choices"]
    assert (reply["prompt_token_ids"], choice["token_ids"]) == (PROMPT, expected.ids)
    assert choice["weight_versions"] == [{"version": "4", "start": 0, "end": 20}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank_offset": 2}, "rank_offset = 2 is not below world_size = 2"),
        ({"master_port": 0}, "master_port"),
        ({"world_size": None}, "world_size"),
        ({"world_size": 2**64 + 1}, "world_size"),
        ({"timeout_s": 0.3}, "the process group at gloo://127.0.0.1:1/"),
    ],
)
def test_a_group_that_cannot_be_made_is_refused_with_the_field(http, change, said):
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    reply = http.post("/init_process_group", json=group | change)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


def test_an_update_needs_a_group_or_files(http):
    reply = http.post("/request_weight_update", json={"version": 1, "parameters_info": []})
    assert reply.status_code == 400
    assert "POST /init_process_group first" in reply.json()["error"]["message"]


def test_weights_arrive_over_a_process_group(http, folder, native):
    tensors = load_file(folder / "weights/new/model.safetensors")
    sender = ProcessGroupSender(ProcessGroupSettings(message_timeout_s=30))
    weights = sender.store(tensors, 3)
    manifest = [[info.name, list(info.shape), info.dtype] for info in weights.tensors]
    http.post(
        "/init_weight_transfer_engine", json={"init_info": {"location": weights.location, "link": LINK}}
    )
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 3, Link(*LINK))
        update(http, {"tensors": manifest}, "3")
        sending.result(60)
    sender.close()
    native.load(tensors, version=3, kv="recompute")
    (expected,) = generated(native, [PROMPT], 20, greedy=True)
    native.load(load_file(folder / "weights/old/model.safetensors"), version=0, kv="recompute")
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20, "temperature": 0}}
    (choice,) = http.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["token_ids"] == expected.ids
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 20}]


def test_a_pause_that_aborts_ends_requests_with_their_tokens(url, http):
    stream = Stream(url, 500)
    with under_way(http, stream):
        assert http.post("/pause", params={"mode": "abort"}).json() == {"status": "paused"}
    assert stream.finish == "abort"
    assert 0 < len(stream.ids) < 500


def test_a_pause_that_waits_completes_requests_and_holds_new_ones(url, http):
    first, second = Stream(url, 300), Stream(url, 5)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(first.read)
        first.begun.wait(60)
        assert http.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
        assert reading.result(60).finish == "length"
        held = pool.submit(second.read)
        update(http, {"location": "new"}, "8")
        http.post("/resume")
        held.result(60)
    assert [span["version"] for span in second.spans] == ["8"]


def test_a_sleeping_server_says_so_and_wakes(http):
    assert http.post("/sleep", params={"level": 1}).json() == {"status": "sleeping", "level": 1}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up").json() == {"status": "awake"}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_an_update_has_a_start_and_ends_once(http):
    for route, body in (
        ("/update_weights", {"update_info": {"location": "new"}}),
        ("/finish_weight_update", None),
    ):
        reply = http.post(route, json=body)
        assert (reply.status_code, "no update was started" in reply.text) == (400, True)
    assert http.post("/start_weight_update", json={"is_checkpoint_format": True}).status_code == 200
    assert "an update is under way" in http.post("/start_weight_update").text


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"1 missing: {NAME}"),
        (lambda t: t.update(extra=torch.zeros(2)), "1 not in the model: extra"),
        (lambda t: t.update({NAME: t[NAME][:1]}), f"1 of another shape: {NAME} [1, 32] in place of [48, 32]"),
        (lambda t: t.update({NAME: t[NAME].half()}), f"1 of another type: {NAME} F16 in place of float32"),
    ],
)
def test_other_tensors_are_refused_and_the_old_weights_stay(http, folder, native, change, message):
    tensors = load_file(folder / "weights/new/model.safetensors")
    change(tensors)
    save_file(tensors, folder / "weights" / "other.safetensors")
    http.post("/start_weight_update")
    reply = http.post("/update_weights", json={"update_info": {"location": "other.safetensors"}})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20, "temperature": 0}}
    (choice,) = http.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["token_ids"] == generated(native, [PROMPT], 20, greedy=True)[0].ids
    assert http.post("/start_weight_update").status_code == 200  # the failed update is over


def test_a_transport_that_the_server_lacks_is_refused(http):
    info = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank_offset": 1}
    reply = http.post("/init_weight_transfer_engine", json={"init_info": info})
    assert "the transport of this server has no master_address" in reply.json()["error"]["message"]


def test_an_address_where_nobody_sends_fails_and_the_server_goes_on(http, folder):
    tensors = load_file(folder / "weights/new/model.safetensors")
    manifest = [[name, list(t.shape), "float32"] for name, t in tensors.items()]
    location = "gloo://127.0.0.1:9/?bucket_bytes=1000&timeout_s=1"
    http.post("/start_weight_update")
    reply = http.post("/update_weights", json={"update_info": {"location": location, "tensors": manifest}})
    assert reply.status_code == 400
    assert "did not send version" in reply.json()["error"]["message"]
