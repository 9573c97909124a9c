"""What do hostile requests do to `tailrace serve` and to `tailrace serve --tinker`?

    python benchmarks/doors.py [--servers serve,tinker] [--num 300] [--limits 1024,256] [--seed N] [--json F]

Each server has the quickstart's model and a folder of its own, beside which other files lie. Several threads
send requests of all kinds in turn (KINDS): texts and bodies that are too large or too deep, that stop half
way or come drop by drop, names that are paths, foreign or repeated ids, numbers that are none, vectors with
bytes missing, results that nobody fetches. Another client asks for the server's health all the while. At the
end an honest client must be served.

    outside     files that appeared, changed or vanished beside the server's folder
    errors      answers of 500 and above
    unanswered  requests that had no answer within a minute, though their client waited for one
    peak_mib    memory of the server's processes over that before the first request, at its highest
    health_s    the slowest answer to the other client; more than 1 s fails, if the machine was idle before
    idle_server_s  the same of a server that does nothing else, which tells how loaded the machine is

Then each server, and a run with `host.listen`, is started with few file descriptors (`ulimit -n`, --limits).
A page of another site sends its requests, of each content type that needs no leave; STRANGERS connections at
a time send half a header, or to the run nothing, and where one is closed another one comes.

    effects     requests of other sites that had an effect, and tokens that were generated meanwhile
    strangers   connections that the process held at once, at most; more than 64 fail
    health_s    the median of the answers to the other client; more than 0.2 s fails
    log_kb      what the process wrote; 1 MB and more fails
    exit        of the run, which has one round and an engine that joins amid the flood

The exit code is 1 if a server has not held. The service needs Tinker's SDK (`make env-tinker`).
"""

import json
import math
import multiprocessing
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import httpx

from common import QUICKSTART, pss, run, tree, write

MODEL, BASE = QUICKSTART.parent / "model", "quickstart"
TOKEN = "tml-a-token-of-the-doors"
NUM_THREADS, TIMEOUT_S = 8, 60.0
MAX_PEAK_MIB, MAX_HEALTH_S = 1024, 1.0
MIB = 2**20


@dataclass
class Target:
    """A server process, and what became of the requests to it."""

    name: str
    url: str
    pid: int
    root: Path
    random: random.Random
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kind: str = ""
    session: str = ""
    model: str = ""
    sampler: str = ""
    seq_id: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {TOKEN}", "x-api-key": TOKEN}

    def send(self, path: str, body: object = None, *, method: str = "POST", **headers: str) -> Any:
        """Send one request, and count the answer. `body`: JSON, bytes, or an iterator of chunks."""
        is_json = not isinstance(body, bytes | Iterator)
        content: Any = json.dumps(body).encode() if is_json else body
        kind = self.kind
        given = {**self.headers, "content-type": "application/json", **headers}
        try:
            reply = httpx.request(method, self.url + path, content=content, headers=given, timeout=TIMEOUT_S)
        except httpx.TimeoutException:
            self.statuses["unanswered"] += 1
            self.faults.append(f"{kind}: {path}: no answer")
            return None
        except httpx.TransportError:  # the server closed the connection while the client sent
            self.statuses["closed"] += 1
            return None
        self.statuses[str(reply.status_code)] += 1
        if reply.status_code >= 500:
            self.faults.append(f"{kind}: {path}: {reply.status_code} {reply.text[:200]}")
        with suppress(ValueError):
            return reply.json()
        return None

    def future(self, path: str, body: object, **headers: str) -> None:
        """As `send` for a request with a result, which is fetched half the time."""
        found = self.send(f"/api/v1{path}", body, **headers)
        if isinstance(found, dict) and "request_id" in found and self.random.random() < 0.5:
            self.send("/api/v1/retrieve_future", {"request_id": found["request_id"]})

    def drip(self, path: str, head: str, *, waits_s: float) -> None:
        """Send the beginning of a request, and hang up without the rest."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        with suppress(OSError), closing(socket.create_connection((host, int(port)), timeout=5)) as sent:
            lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", head]
            lines += [f"{key}: {value}" for key, value in self.headers.items()]
            sent.sendall(("\r\n".join(lines) + "\r\n\r\n").encode() + b'{"')
            time.sleep(waits_s)
        self.statuses["hung up"] += 1

    def next(self) -> int:
        """A number that the training client has not used."""
        self.seq_id += 1
        return self.seq_id


Attack = Callable[[Target], None]
SIMPLE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
STRANGERS, MAX_STRANGERS, MAX_OPENED = 600, 64, 20_000
MAX_MEDIAN_S, MAX_LOG_BYTES, FLOOD_S = 0.2, 10**6, 10.0


def chunks(size: int, piece: bytes = b"a" * MIB) -> Iterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(size // len(piece)):
        yield piece
    yield b'"}'


def strange(r: random.Random) -> Any:
    """A value that is not what a field takes."""
    choices = [math.nan, math.inf, -math.inf, -1, 0, 10**30, -(10**30), 1e308, 2**63, "x", "", None, [], {}]
    return r.choice([*choices, True, "\0", "9" * 5000, [[]], {"a": 1}, 0.5])


PATHS = [
    "../../outside",
    "{root}/outside",
    "..",
    ".",
    "/etc",
    "a/../../outside",
    "x\0y",
    "\0",
    "~",
    "a" * 5000,
]
PATHS += ["{root}/outside/precious", "../outside/precious", "é" * 300, "con:1", "%2e%2e", "tinker://x", "\n"]


def hostile_path(t: Target) -> str:
    return t.random.choice(PATHS).format(root=t.root)


def bomb(r: random.Random, key: str) -> bytes:
    """A body whose objects take more memory than its bytes."""
    piece = r.choice(["[]", "{}", "[[]]", '""', "-1", "0.5", "999", "null", '{"a":1}', '{"role":"user"}'])
    size = r.choice([1, 4, 16, 31]) * MIB
    return f'{{"{key}": [{",".join([piece] * (size // (len(piece) + 1)))}]}}'.encode()


def any_server(path: str, key: str) -> dict[str, Attack]:
    """Kinds that need no word of a protocol."""

    def deep(t: Target) -> None:
        t.send(path, t.random.choice([b"[", b'{"a":']) * t.random.choice([1000, 300_000]))

    def large(t: Target) -> None:
        t.send(path, json.dumps({key: "ab c" * (t.random.choice([1, 4, 31]) * MIB // 4)}).encode())

    def not_json(t: Target) -> None:
        t.send(path, t.random.choice([b"", b"null", b"\xff\xfe", b"NaN", b'"\\ud800"', b"{", b"9" * 5000]))

    def form(t: Target) -> None:
        t.send(path, b'{"a": 1}', **{"content-type": t.random.choice(["text/plain", "", "x/" + "y" * 99])})

    def half(t: Target) -> None:
        size = t.random.choice([2, 1000, 32 * MIB])
        head = t.random.choice([f"content-length: {size}", "transfer-encoding: chunked"])
        t.drip(path, head, waits_s=t.random.choice([0.0, 0.5, 35.0]))

    return {
        "deep": deep,
        "large text": large,
        "bomb": lambda t: t.send(path, bomb(t.random, key)),
        "chunked": lambda t: t.send(path, chunks(t.random.choice([40, 200]) * MIB)),
        "not JSON": not_json,
        "no JSON type": form,
        "half a body": half,
    }


ROUTES = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/inference/v1/generate": "token_ids",
}


def serve_kinds() -> dict[str, Attack]:
    """Of the OpenAI routes, and of those that change weights."""

    def fields(t: Target) -> None:
        path, key = t.random.choice(list(ROUTES.items()))
        good = {"prompt": "1+1", "messages": [{"role": "user", "content": "1+1"}], "token_ids": [1, 2]}[key]
        body: dict[str, Any] = {key: good, "max_tokens": 4}
        names = ["n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "max_tokens"]
        names += [
            "logprobs",
            "stream",
            "request_id",
            "priority",
            "sampling_params",
            "chat_template_kwargs",
            key,
        ]
        body |= {name: strange(t.random) for name in t.random.sample(names, 2)}
        t.send(path, body)

    def many(t: Target) -> None:
        body = {
            "prompt": [1] * t.random.choice([2, 200]),
            "n": 256,
            "max_tokens": 100_000,
            "ignore_eos": True,
        }
        with suppress(httpx.TimeoutException):
            httpx.post(t.url + "/v1/completions", json=body, timeout=0.3)
        t.statuses["hung up"] += 1

    def weights(t: Target) -> None:
        body = {"version": t.random.choice([1, -1, 10**30]), "location": hostile_path(t)}
        t.send("/request_weight_update", body)

    def control(t: Target) -> None:
        path = t.random.choice(
            ["/update_weights", "/init_weight_transfer_engine", "/abort_requests", "/sleep"]
        )
        t.send(path, {"update_info": strange(t.random)}, authorization="Bearer no")

    def messages(t: Target) -> None:
        content: Any = t.random.choice([[{"text": 7}], [{}], {"text": "a"}, 7, "\ud800", None, ["a"]])
        t.send("/v1/chat/completions", {"messages": [{"role": strange(t.random), "content": content}]})

    found: dict[str, Attack] = {
        "fields": fields,
        "many samples": many,
        "weights": weights,
        "no owner": control,
    }
    for path, key in ROUTES.items():
        found |= {f"{name} {key}": attack for name, attack in any_server(path, key).items()}
    return found | {"messages": messages}


def tensor(pb: Any, r: random.Random, values: list[int], name: str) -> Any:
    """A vector, often with a type, a shape or a number of bytes that is not its own."""
    import numpy as np

    is_ids = name == "target_tokens"
    data = np.asarray(values, np.int64 if is_ids else np.float32)
    if not is_ids and r.random() < 0.3:
        data[:1] = r.choice([math.nan, math.inf, -math.inf])
    dense = data.tobytes()[: r.choice([None, None, -1, -3, 0])]
    dtype = r.choice([pb.DTYPE_INT64 if is_ids else pb.DTYPE_FLOAT32] * 3 + [0, 3, 4, 99])
    return pb.Tensor(dense=dense, dtype=dtype, shape=r.choice([[len(values)], [-1], [2**40], [1, 1]]))


def hostile_pass(t: Target) -> bytes:
    """A pass whose data may be anything."""
    import numpy as np
    from tinker.proto import tinker_public_pb2 as pb

    r = t.random
    message = pb.ForwardBackwardRequest(model_id=t.model, seq_id=t.next())
    message.loss_fn = r.choice(["cross_entropy", "ppo", "cispo", "dro", "", "x"])
    for _ in range(r.choice([0, 1, 1, 3, 5000])):
        datum = message.data.add()
        ids = [r.choice([5, 6, 7, -1, 10**6]) if r.random() < 0.1 else 5 for _ in range(r.choice([0, 1, 9]))]
        tokens = np.asarray(ids, np.int32).tobytes()[: r.choice([None, None, -1])]
        datum.model_input.add().encoded_text.tokens = tokens
        for name in ("target_tokens", *r.choice([("weights",), ("advantages", "logprobs"), ()])):
            datum.loss_fn_inputs[name].CopyFrom(tensor(pb, r, ids, name))
    if r.random() < 0.3:
        config = message.loss_fn_config_v2[r.choice(["clip_low_threshold", "beta", "x"])]
        config.number = r.choice([math.nan, math.inf, -1.0, 0.5])
        if r.random() < 0.5:
            config.text = "0.2"
    return bytes(message.SerializeToString())


def tinker_kinds() -> dict[str, Attack]:
    """Of Tinker's API."""
    binary = {"content-type": "application/x-protobuf"}

    def name(t: Target) -> None:
        id = t.random.choice(
            [hostile_path(t), t.model + hostile_path(t), f"{t.session}:train:{hostile_path(t)}"]
        )
        body: dict[str, Any] = {"model_id": t.random.choice([id, id, id, t.model]), "seq_id": t.next()}
        match t.random.choice(["/save_weights", "/save_weights_for_sampler", "/load_weights", "/get_info"]):
            case "/load_weights":
                path = t.random.choice(
                    [f"tinker://{id}/weights/x", hostile_path(t), "tinker://base/weights/x"]
                )
                both = t.random.choice([{}, {"session_id": t.session, "model_seq_id": 10**6}])
                t.future("/load_weights", {**body, **both, "path": path, "optimizer": True})
            case "/get_info":
                t.send("/api/v1/get_info", {"model_id": id})
            case path:
                t.future(path, {**body, "path": t.random.choice(["ok", "ok", hostile_path(t), "a.partial"])})

    def names(t: Target) -> None:
        for _ in range(8):
            name(t)

    def numbers(t: Target) -> None:
        params = {
            t.random.choice(["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]): 0
        }
        params = {key: strange(t.random) for key in params} | t.random.choice([{}, {"type": "adamw"}])
        t.future("/optim_step", {"model_id": t.model, "seq_id": t.next(), "adam_params": params})

    def passes(t: Target) -> None:
        t.future("/forward_backward", hostile_pass(t), **binary)

    def raw_pass(t: Target) -> None:
        t.send(
            "/api/v1/forward_backward", t.random.choice([b"\xff" * 99, b"\x0a\x00" * (15 * MIB)]), **binary
        )

    def repeated(t: Target) -> None:
        body, seq_id = hostile_pass(t), t.seq_id
        for _ in range(3):
            t.future("/forward_backward", body, **binary)
        t.future("/save_weights", {"model_id": t.model, "seq_id": seq_id, "path": "again"})

    def canceled(t: Target) -> None:
        t.future("/forward_backward", hostile_pass(t), **binary)
        t.send("/api/v1/cancel_future", {"request_id": f"{t.model}:{t.seq_id}"})

    def samples(t: Target) -> None:
        fields = ["temperature", "top_p", "top_k", "seed", "max_tokens", "stop"]
        params = {name: strange(t.random) for name in t.random.sample(fields, 2)}
        tokens = t.random.choice([[5, 6], [-1], [10**30], [], [5] * 2000, ["x"] * 1000])
        chunk = {"type": "encoded_text", "tokens": tokens}
        body: dict[str, Any] = {"prompt": {"chunks": [chunk]}, "sampling_params": params}
        body |= {"sampling_session_id": t.random.choice([t.sampler, hostile_path(t)]), "seq_id": t.next()}
        t.future(
            "/asample", body | {"num_samples": t.random.choice([1, 1, 0, 10**9]), "prompt_logprobs": True}
        )

    def uncollected(t: Target) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        body = {"prompt": prompt, "sampling_params": {"stop": []}, "sampling_session_id": t.sampler}
        for _ in range(8):
            t.send("/api/v1/asample", body | {"num_samples": 1024, "seq_id": t.next()})

    def sessions(t: Target) -> None:
        version = t.random.choice(["9" * 5000 + ".1", "²", "0.38", "", "1.2.3", "0.1"])
        for _ in range(20):
            t.send("/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": version})
        t.send("/api/v1/session_heartbeat", {"session_id": hostile_path(t)})
        t.send("/api/v1/retrieve_future", {"request_id": hostile_path(t)})

    def samplers(t: Target) -> None:
        path = t.random.choice([None, f"tinker://{hostile_path(t)}/sampler_weights/x", hostile_path(t)])
        body = {"session_id": t.random.choice([t.session, hostile_path(t)]), "base_model": BASE}
        t.send("/api/v1/create_sampling_session", body | {"sampling_session_seq_id": 99, "model_path": path})

    found = {"names": names, "numbers": numbers, "passes": passes, "no pass": raw_pass, "repeated": repeated}
    found |= {"canceled": canceled, "samples": samples, "uncollected": uncollected, "sessions": sessions}
    return found | any_server("/api/v1/asample", "prompt") | {"samplers": samplers}


def honest_serve(t: Target) -> str:
    """What an honest client gets; empty: what it asked for."""
    reply = httpx.post(t.url + "/v1/completions", json={"prompt": "1+1", "max_tokens": 4}, timeout=TIMEOUT_S)
    return "" if reply.status_code == 200 else reply.text


def honest_tinker(t: Target) -> str:
    """The same of a client that trains a step and samples."""
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=t.url, api_key=TOKEN)
    try:
        training = client.create_lora_training_client(base_model=BASE).result()
        inputs = {"target_tokens": [6, 7], "weights": [1.0, 1.0]}
        data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=inputs)]
        before = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        after = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        return "" if after < before else f"loss {before} to {after}"
    finally:
        client.close("success").result()


def prepare_tinker(t: Target) -> None:
    """A session with the trainer and a sampling client, which the hostile requests name."""
    asked = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    t.session = t.send("/api/v1/create_session", asked)["session_id"]
    made = t.send("/api/v1/create_model", {"session_id": t.session, "model_seq_id": 0, "base_model": BASE})
    t.model = made["model_id"]
    t.send("/api/v1/retrieve_future", {"request_id": made["request_id"]})
    body = {"session_id": t.session, "sampling_session_seq_id": 0, "base_model": BASE}
    t.sampler = t.send("/api/v1/create_sampling_session", body)["sampling_session_id"]


def end_tinker(t: Target) -> None:
    t.send(f"/api/v1/sessions/{t.session}/finish")


class Door(NamedTuple):
    """How one of the servers is started, attacked and used."""

    words: tuple[str, ...]
    health: str
    kinds: Callable[[], dict[str, Attack]]
    honest: Callable[[Target], str]
    prepare: Attack = lambda t: None
    end: Attack = lambda t: None


DOORS = {
    "serve": Door(("--weights-folder", "own/state"), "/health", serve_kinds, honest_serve),
    "tinker": Door(
        ("--tinker", "--state-folder", "own/state", "--dtype", "float32", "--trainer.dtype", "float32"),
        "/api/v1/healthz",
        tinker_kinds,
        honest_tinker,
        prepare_tinker,
        end_tinker,
    ),
}


def limited(limit: int, command: list[str]) -> list[str]:
    """The command with a limit of file descriptors; 0: that of this process."""
    return ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "_", *command] if limit else command


@contextmanager
def started(name: str, seed: int, limit: int = 0) -> Iterator[Target]:
    """A server in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        root = Path(folder)
        for each in ("own/state", "outside/precious"):
            (root / each).mkdir(parents=True)
        (root / "outside" / "precious" / "file").write_text("precious", encoding="utf-8")
        command = [sys.executable, "-m", "tailrace.cli", "serve", str(MODEL), "--port", "0"]
        command += ["--served-model-name", BASE, "--kv-cache-tokens", "65536", *DOORS[name].words]
        with (
            open(root / "stderr", "w", encoding="utf-8") as errors,
            subprocess.Popen(
                limited(limit, command),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=root,
                env={**os.environ, "TAILRACE_TOKEN": TOKEN},
                encoding="utf-8",
            ) as process,
        ):
            try:
                assert process.stdout is not None
                _, url = process.stdout.readline().split()
                yield Target(name, url, process.pid, root, random.Random(seed))
            finally:
                process.terminate()


def memory(pid: int) -> int:
    """Bytes of a process and its descendants."""
    return sum(map(pss, tree(pid)))


def watch(pid: int, url: str, headers: Mapping[str, str], ended: Any, found: Any) -> None:
    """The other client, a process of its own. It asks for the health, then a file of an idle server of the
    library for comparison, and looks at the memory, until `ended`."""
    found.put(memory(pid))
    seen = {"health_s": 0.0, "idle_server_s": 0.0, "peak": 0, "health_failed": 0, "health_asked": 0}
    handler = type("Handler", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    idle = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=idle.serve_forever, daemon=True).start()
    other = f"http://127.0.0.1:{idle.server_port}/"
    with httpx.Client(headers=headers, timeout=TIMEOUT_S) as client:
        while not ended.wait(0.1):
            for key, asked in (("health_s", url), ("idle_server_s", other)):
                began_s = time.monotonic()
                try:
                    seen["health_failed"] += client.get(asked).status_code != 200
                except httpx.HTTPError:
                    seen["health_failed"] += 1
                seen[key] = max(seen[key], round(time.monotonic() - began_s, 3))
            seen["health_asked"] += 1
            seen["peak"] = max(seen["peak"], memory(pid))
    found.put(seen)


def files_outside(root: Path) -> dict[str, tuple[int, int]]:
    """Everything beside the server's folder, with size and time of change."""
    own = root / "own" / "state"
    found = {path: path.lstat() for path in root.rglob("*") if not path.is_relative_to(own)}
    return {
        str(path): (0 if path.is_dir() else state.st_size, state.st_mtime_ns)
        for path, state in found.items()
        if path != root / "stderr"
    }


def attacked(name: str, num: int, seed: int) -> dict[str, Any]:
    """Attack a server. Returns what is described above."""
    door, load = DOORS[name], os.getloadavg()[0]
    with started(name, seed) as target:
        door.prepare(target)
        before, kinds = files_outside(target.root), door.kinds()
        context = multiprocessing.get_context("spawn")
        ended, found = context.Event(), context.Queue()
        words = target.pid, target.url + door.health, target.headers, ended, found
        context.Process(target=watch, args=words, daemon=True).start()
        idle = found.get(timeout=TIMEOUT_S)

        def attack(number: int) -> None:
            kind = list(kinds)[number % len(kinds)]
            one = Target(name, target.url, target.pid, target.root, random.Random(f"{seed} {number}"))
            one.kind, one.session, one.model, one.sampler = kind, target.session, target.model, target.sampler
            one.seq_id, one.statuses, one.faults = 100 * (number + 1), target.statuses, target.faults
            kinds[kind](one)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for future in [pool.submit(attack, number) for number in range(num)]:
                future.result()
        ended.set()
        seen = found.get(timeout=TIMEOUT_S)
        door.end(target)
        refused = door.honest(target)
        outside = {key for key, value in {**before, **files_outside(target.root)}.items()}
        after = files_outside(target.root)
        changed = sorted(key for key in outside if before.get(key) != after.get(key))
        said = (target.root / "stderr").read_text(encoding="utf-8")
    errors = sum(
        count for status, count in target.statuses.items() if status.isdigit() and int(status) >= 500
    )
    result = {
        "server": name,
        "requests": num,
        "answers": dict(sorted(target.statuses.items())),
        "outside": changed,
        "errors": errors,
        "unanswered": target.statuses["unanswered"],
        "tracebacks": said.count("Traceback"),
        "peak_mib": round((seen.pop("peak") - idle) / MIB),
        **seen,
        "load_before": round(load, 1),
        "honest": refused or "served",
        "faults": target.faults[:20],
    }
    slow = seen["health_s"] > MAX_HEALTH_S and load <= (os.cpu_count() or 1)
    counts = errors + target.statuses["unanswered"] + seen["health_failed"] + len(changed)
    result["held"] = not (counts or refused or slow or result["peak_mib"] > MAX_PEAK_MIB)
    return result


class Crowd(Thread):
    """Connections of nobody to a port, STRANGERS at a time and MAX_OPENED in all.

    Args:
        pid: of the process that listens.
        sent: on each connection.
        known: connections of others to the port, at most.
    """

    def __init__(self, pid: int, port: int, sent: bytes, known: int = 1) -> None:
        super().__init__(daemon=True)
        self._pid, self._port, self._sent, self._known = pid, port, sent, known
        self._ended = Event()
        self.num_opened = self.most_held = 0

    def run(self) -> None:
        """Open and close connections until `end`."""
        opened = deque[socket.socket]()
        while not self._ended.wait(0.004 if len(opened) == STRANGERS else 0.0):
            if self.num_opened == MAX_OPENED:
                continue
            with suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", self._port), 5.0))
                opened[-1].sendall(self._sent)
                self.num_opened += 1
            if len(opened) > STRANGERS:
                opened.popleft().close()
            if self.num_opened % 50 == 0:
                self.most_held = max(self.most_held, self._num_held() - self._known)
        for each in opened:
            each.close()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _num_held(self) -> int:
        """The descriptors of the process that are connections to the port."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
        own, listens = f":{self._port:04X}", "0A"
        inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(own) and row[3] != listens}
        num = 0
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for each in Path(f"/proc/{self._pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed since
                    num += os.readlink(each) in inodes
        return num


def generated(target: Target) -> float:
    """The tokens that a server of the OpenAI routes has generated."""
    if target.name != "serve":
        return 0.0
    rows = httpx.get(target.url + "/metrics", timeout=TIMEOUT_S).text.splitlines()
    return sum(float(row.split()[-1]) for row in rows if row.startswith("vllm:generation_tokens_total"))


def asked_from_another_site(target: Target, num: int) -> int:
    """Send the requests of a page of another site. Returns how many were carried out."""
    path, body = {
        "serve": ("/v1/completions", b'{"prompt": "1+1", "max_tokens": 8}'),
        "tinker": ("/api/v1/create_session", b'{"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}'),
    }[target.name]

    def ask(number: int) -> bool:
        kind = SIMPLE_TYPES[number % len(SIMPLE_TYPES)] + ("; a=json", "; application/json", "")[number % 2]
        headers = {"content-type": kind}
        if number % 4 >= 2:  # as a browser does
            headers |= {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"}
        return httpx.post(target.url + path, content=body, headers=headers, timeout=TIMEOUT_S).is_success

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(ask, range(num * len(SIMPLE_TYPES))))


def flooded(name: str, num: int, limit: int) -> dict[str, Any]:
    """Let pages of other sites and strangers at a server with few descriptors."""
    with started(name, 0, limit) as target:
        before = generated(target)
        effects = asked_from_another_site(target, num)
        tokens, seconds = generated(target) - before, list[float]()
        half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-"
        crowd = Crowd(target.pid, int(target.url.rpartition(":")[2]), half)
        with httpx.Client(headers=target.headers, timeout=TIMEOUT_S) as client:
            ends_s = math.inf
            while time.monotonic() < ends_s:
                began_s = time.monotonic()
                assert client.get(target.url + DOORS[name].health).status_code == 200
                if not seconds:  # its connection is known before the others come
                    crowd.start()
                    ends_s = time.monotonic() + FLOOD_S
                seconds.append(time.monotonic() - began_s)
                time.sleep(0.05)
        crowd.end()
        refused = DOORS[name].honest(target)
        log = (target.root / "stderr").stat().st_size
    median = round(statistics.median(seconds), 3)
    result = {"server": name, "ulimit": limit, "effects": effects + round(tokens), "health_s": median}
    result |= {"opened": crowd.num_opened, "strangers": crowd.most_held, "log_kb": log // 1000}
    bad = result["effects"] or median > MAX_MEDIAN_S or crowd.most_held > MAX_STRANGERS or refused
    return result | {"honest": refused or "served", "held": not (bad or log >= MAX_LOG_BYTES)}


def crowded_run(limit: int) -> dict[str, Any]:
    """Let strangers at a run with few descriptors, before its engine joins and until it has ended."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder, ExitStack() as ends:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = ["--output-dir", f"{folder}/run", "--run.rounds", "1", "--run.eval_prompts", "8"]
        words += ["--schedule.groups_per_round", "4", "--schedule.groups_per_step", "2"]
        words += ["--host.join", '["engine"]', "--host.listen", f"127.0.0.1:{port}"]
        words += ["--weights.transport", "filesystem"]
        log = ends.enter_context(open(f"{folder}/log", "wb"))
        tailrace = [sys.executable, "-m", "tailrace.cli"]
        environment = {**os.environ, "TAILRACE_JOIN_TOKEN": TOKEN}

        def begun(*command: str) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen(
                limited(limit, [*tailrace, *command]), stdout=log, stderr=log, env=environment
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        training = begun("train", str(QUICKSTART), *words)
        while training.poll() is None:
            time.sleep(0.1)
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
        crowd = Crowd(training.pid, port, b"")
        crowd.start()
        time.sleep(FLOOD_S / 5)
        begun("join", "engine", f"127.0.0.1:{port}")
        try:
            code: int | None = training.wait(timeout=10 * TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        crowd.end()
        said = Path(f"{folder}/log").read_bytes()
        size = len(said)
        result = {"server": "host.listen", "ulimit": limit, "exit": code, "opened": crowd.num_opened}
        result |= {"strangers": crowd.most_held, "log_kb": size // 1000}
        bad = code != 0 or crowd.most_held > MAX_STRANGERS or size >= MAX_LOG_BYTES
        return result | {"held": not bad, **({"said": said[-2000:].decode()} if bad else {})}


def main(
    *,
    servers: tuple[str, ...] = tuple(DOORS),
    num: int = 300,
    limits: tuple[int, ...] = (1024, 256),
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Attack the servers, and print what became of them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    results = [attacked(name, num, seed) for name in servers]
    for limit in limits:
        results += [flooded(name, num, limit) for name in servers] + [crowded_run(limit)]
    for result in results:
        for key, value in result.items():
            print(f"{key:14}{value}")
        print()
    write(json, results)
    sys.exit(0 if all(result["held"] for result in results) else 1)


if __name__ == "__main__":
    run(main)
