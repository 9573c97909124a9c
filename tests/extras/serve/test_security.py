"""Who may change weights and state, and what the server makes of hostile requests and files."""

import asyncio
import errno
import pickle
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, HTTPException, Request
from pydantic import ValidationError

from helpers.served import TOKEN
from tailrace.cli import main
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.workers.engine import EngineJob
from tailrace.errors import WeightsRefused
from tailrace.extras.serve import listening
from tailrace.extras.serve.app import make_app, openai_app
from tailrace.extras.serve.command import bearer_token
from tailrace.extras.serve.control import OfferedWeights
from tailrace.extras.serve.formats import ChatCompletionRequest, CompletionRequest, GenerateRequest
from tailrace.extras.serve.generation import MAX_OPEN_TOKENS, ServedEngine, ServedModel
from tailrace.extras.serve.listening import HttpServer
from tailrace.extras.serve.settings import ServeSettings
from tailrace.types import SamplingParams

JSON = {"content-type": "application/json"}
OPEN_POSTS = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"}


@pytest.fixture
def anonymous(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("header", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN])
def test_no_route_that_changes_something_answers_without_the_token(http, anonymous, header):
    paths = http.get("/openapi.json").json()["paths"]
    changing = {path for path, methods in paths.items() if "post" in methods} - OPEN_POSTS
    assert {"/pause", "/update_weights", "/request_weight_update", "/abort_requests", "/sleep"} <= changing
    headers = {} if header is None else {"authorization": header}
    for path in changing:
        reply = anonymous.post(path, headers=headers, json={})
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), path
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("path", ["/pause/", "//pause", "/nothing", "/v1/%2e%2e/pause", "/docs", "/static/x"])
def test_other_spellings_of_a_path_reach_no_route(anonymous, http, path):
    assert anonymous.post(path).status_code in (401, 404)
    assert http.get("/is_paused").json() == {"is_paused": False}


class Unstarted:
    """The worker of an engine that answers nothing."""

    def subscribe(self, on_event):
        pass

    def send(self, method, *arguments):
        pass

    async def call(self, method, *arguments):
        raise AssertionError


def unstarted(model):
    job = EngineJob(
        threads=1,
        health_timeout_s=1.0,
        model=model,
        engine=NativeEngineSettings(),
        sampling=SamplingSettings(max_completion_tokens=9),
    )
    return ServedEngine(Unstarted(), job)


@pytest.fixture
def status(folder):
    """The status of a GET to an application that listens on a host."""

    def get(path, host="127.0.0.1:8000", *, listening="127.0.0.1", **headers):
        model = ServedModel("tiny", folder / "model", 61, 9)
        settings = ServeSettings(host=listening, served_model_name="tiny")

        async def ask():
            app = make_app(unstarted(model.path), load_tokenizer(folder / "model"), model, settings, TOKEN)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.get(path, headers={"host": host, **headers})

        return asyncio.run(ask()).status_code

    return get


def test_beyond_loopback_only_health_is_open(status):
    for path in ("/v1/models", "/metrics", "/openapi.json", "/is_paused"):
        assert status(path, listening="0.0.0.0") == 401
        assert status(path, listening="0.0.0.0", authorization=f"Bearer {TOKEN}") == 200
    assert status("/health", listening="0.0.0.0") == 200


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "127.8.8.8:1", "[::1]:8000"])
def test_a_request_that_names_this_machine_needs_no_token_to_read(status, host):
    assert status("/v1/models", host) == 200


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8000", "127.0.0.1.example", "[::1", ""])
def test_a_request_under_the_name_of_another_machine_needs_the_token(status, host):
    assert status("/v1/models", host) == 401
    assert status("/v1/models", host, authorization=f"Bearer {TOKEN}") == 200
    assert status("/health", host) == 200


def test_a_connection_without_a_next_request_is_closed_and_a_slow_reply_is_not():
    whole = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def app(scope, receive, send):
        await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def told(address, *parts):
        """What the server says until it closes the connection, to a client that sends parts slowly."""
        reader, writer = await asyncio.open_connection(*address)
        said = []

        async def listen():
            with suppress(ConnectionError):
                while part := await reader.read(1000):
                    said.append(part)

        listening = asyncio.ensure_future(listen())
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.1)
        await listening
        writer.close()
        return b"".join(said)

    async def run():
        server = HttpServer(app, bound, idle_timeout_s=0.2)
        serving = asyncio.ensure_future(server.serve())
        address = bound.getsockname()
        first, second = await asyncio.gather(told(address, whole), told(address, whole, whole))
        assert [reply.count(b"200 OK") for reply in (first, second)] == [1, 2]
        assert first.endswith(b"ok") and second.endswith(b"ok")
        server.stop()
        await serving

    with socket.create_server(("127.0.0.1", 0)) as bound:
        asyncio.run(asyncio.wait_for(run(), 60))


async def bodies_to(server, *requests):
    """What a server answers to the beginnings of requests, each on a connection of its own."""

    async def answer(request):
        reader, writer = await asyncio.open_connection(*server)
        writer.write(request)
        status = await reader.readline()
        writer.close()
        return int(status.split()[1])

    return await asyncio.gather(*map(answer, requests))


def test_a_body_that_stops_and_bodies_that_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(listening, "MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(listening, "BODY_TIMEOUT_S", 0.5)
    router = APIRouter()

    @router.post("/")
    async def length(request: Request):
        return len(await request.body())

    def request(size, sent):
        head = f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
        return head.encode() + b"a" * sent

    async def run():
        server = HttpServer(openai_app([router], max_body_bytes=10_000), bound)
        serving = asyncio.ensure_future(server.serve())
        address = bound.getsockname()
        assert await bodies_to(address, request(600, 600), request(10, 1)) == [200, 408]
        assert await bodies_to(address, request(1100, 1100)) == [429]
        halves = asyncio.ensure_future(bodies_to(address, request(700, 600)))
        await asyncio.sleep(0.2)
        assert await bodies_to(address, request(600, 600)) == [429]
        assert await halves == [408]
        assert await bodies_to(address, request(900, 900)) == [200]  # nothing is held any more
        server.stop()
        await serving

    with socket.create_server(("127.0.0.1", 0)) as bound:
        asyncio.run(asyncio.wait_for(run(), 60))


def test_the_body_of_a_client_that_may_not_is_not_read(http, anonymous):
    paths = http.get("/openapi.json").json()["paths"]
    for path in {path for path, methods in paths.items() if "post" in methods} - OPEN_POSTS:
        assert anonymous.post(path, content=b"[" * 300_000, headers=JSON).status_code == 401
    for path in OPEN_POSTS:
        elsewhere = {**JSON, "host": "elsewhere"}
        assert anonymous.post(path, content=b"[" * 300_000, headers=elsewhere).status_code == 401


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(anonymous, route):
    """512 tokens: the bodies of three requests; the first is encoded up to where it is too long."""
    for size, status, words in (
        (900_000, 400, "maximum context length is 512 tokens, but the prompt has"),
        (1_100_000, 413, "Too Large"),
    ):
        text = "A" * size
        body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
        del body["messages" if route == "/v1/completions" else "prompt"]
        reply = anonymous.post(route, json=body)
        assert (reply.status_code, words in reply.text) == (status, True), reply.text


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * 1000}),
        (GenerateRequest, {"token_ids": [-1] * 1000, "sampling_params": {}}),
        (ChatCompletionRequest, {"messages": [1] * 1000}),
    ],
)
def test_one_defect_of_a_list_is_enough(kind, body):
    """Each costs more memory than the list."""
    with pytest.raises(ValidationError) as why:
        kind.model_validate(body)
    assert why.value.error_count() <= 2  # a prompt may be a text, too


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 400),
        ("text/plain; a=application/json", 400),
        ("application/x-www-form-urlencoded; x=json", 400),
        ("multipart/form-data; boundary=json", 400),
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
    ],
)
def test_a_page_of_another_site_cannot_ask_without_asking_first(anonymous, kind, status):
    """It may send a form and plain text at once, and JSON only if the server allowed it."""
    body = b'{"prompt": [1], "max_tokens": 1}'
    for route in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        if status == 400 or route == "/v1/completions":
            reply = anonymous.post(route, content=body, headers={"content-type": kind})
            told = "Content-Type: application/json" in reply.text
            assert (reply.status_code, told) == (status, status == 400)


async def test_prompts_under_way_have_a_limit():
    requests = unstarted(Path())
    request = GenerationRequest("", [1] * 1000, (), 0, False, SamplingParams(1))
    requests.check_room(2 * MAX_OPEN_TOKENS)  # alone
    arriving = requests.generate(frozenset(), [request])
    waiting = asyncio.ensure_future(anext(arriving))
    await asyncio.sleep(0)
    with pytest.raises(HTTPException, match="too many requests are under way"):
        requests.check_room(MAX_OPEN_TOKENS)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await arriving.aclose()
    requests.check_room(MAX_OPEN_TOKENS)


def test_the_server_listens_on_loopback_alone_unless_told_otherwise(url):
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.2", httpx.URL(url).port)) == errno.ECONNREFUSED


LIMIT = ServeSettings(served_model_name="x").max_body_bytes


@pytest.mark.parametrize(
    ("route", "chunked", "status"),
    [
        ("/v1/completions", False, 413),
        ("/v1/completions", True, 413),
        ("/update_weights", True, 401),
        ("/sleep", True, 401),
    ],
)
def test_a_body_that_is_too_large_is_refused_and_the_client_reads_why(anonymous, route, chunked, status):
    """A connection that is closed while the client sends breaks before the client has read the reply."""
    body = b'{"prompt": "' + b"a" * LIMIT + b'"}'
    chunks = (body[start : start + 2**20] for start in range(0, len(body), 2**20))
    reply = anonymous.post(route, content=chunks if chunked else body, headers=JSON)
    assert reply.status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [1], "temperature": NaN}',
        b'{"prompt": [1], "seed": 1e400}',
        b'{"prompt": [1], "\\ud800": 1, "n": "\\ud800"}',
        b'{"prompt": [-1]}',
        b'{"prompt": [[]]}',
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/inference/v1/generate", "/update_weights"])
def test_a_malformed_body_is_the_clients_error(http, route, body):
    reply = http.post(route, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


class Exploit:
    def __reduce__(self):
        return (exit, (1,))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("weights.pt", "is not a .safetensors file; no other format is read"),
        ("pickled.safetensors", "cannot be read"),
        ("truncated.safetensors", "cannot be read"),
        ("nothing.safetensors", "there is no 'nothing.safetensors' below"),
        ("../model/model.safetensors", "there is no '../model/model.safetensors' below"),
        ("{outside}", "below the server's --weights-folder"),
        ("link.safetensors", "there is no 'link.safetensors' below"),
        ("linked", "below the server's --weights-folder"),
        ("/etc", "there is no '/etc' below"),
        ("new/config.json", "is not a .safetensors file"),
        ("..", "there is no '..' below"),
        ("empty", "the folder has no safetensors weights"),
        ("new\0", "there is no 'new\\x00' below"),
        ("x" * 5000, "below the server's --weights-folder"),
        (7, "location: Input should be a valid string"),
    ],
)
def test_only_safetensors_below_the_folder_are_read(http, folder, location, message):
    weights, outside = folder / "weights", folder / "model" / "model.safetensors"
    (weights / "weights.pt").write_bytes(pickle.dumps(Exploit()))
    (weights / "pickled.safetensors").write_bytes(pickle.dumps(Exploit()))
    (weights / "truncated.safetensors").write_bytes(outside.read_bytes()[:5000])
    for name in ("linked", "empty"):
        (weights / name).mkdir(exist_ok=True)
    for link in ("link.safetensors", "linked/model.safetensors"):
        if not (weights / link).is_symlink():
            (weights / link).symlink_to(outside)
    if isinstance(location, str):
        location = location.format(outside=outside)
    reply = http.post("/request_weight_update", json={"version": 1, "location": location})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert http.get("/weight_info").json() == {"weight_version": "default"}


def test_without_a_token_one_is_made_in_a_file_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_TOKEN", TOKEN)
    file = tmp_path / "token"
    made = bearer_token(file)
    assert len(made) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert bearer_token(file) == made


def test_without_a_token_and_a_file_a_new_one_is_told(capsys, monkeypatch):
    monkeypatch.delenv("TAILRACE_TOKEN", raising=False)
    tokens = [bearer_token(None), bearer_token(None)]
    assert capsys.readouterr().err == "".join(f"token     {token}\n" for token in tokens)
    assert tokens[0] != tokens[1]


def test_without_a_weights_folder_no_file_is_read(folder):
    offered = OfferedWeights(None, expected_tensors(folder / "model", "float32"))
    with pytest.raises(WeightsRefused, match="reads no files; start it with --weights-folder"):
        offered.check({"location": str(folder / "weights" / "new")}, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port = '99999': it must be at most 65535; lower it: 0 to 65,535. 0: a"),
        (
            ["--dtype", "int8"],
            "--dtype = 'int8': there is no such choice; choose from 'float32' or",
        ),
        (["--device", "tpu"], """--device = 'tpu': a device is "cpu", "cuda" or "cuda:N"; correct it"""),
        (
            ["--threads", "0", "--drafts", "on"],
            "--drafts = 'on': there is no such choice; choose from 'off'",
        ),
        (["--weights-folder", "/nowhere"], "--weights-folder = '/nowhere': there is no such folder"),
        (["--run.rounds", "3"], "--run.rounds = '3': serve has no config to override"),
        (["--host", "192.0.2.1"], "--host, --port = '192.0.2.1:8000': the server cannot listen there"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_model_is_loaded(
    folder, capsys, monkeypatch, options, message
):
    monkeypatch.setenv("TAILRACE_TOKEN", TOKEN)
    assert main(["serve", str(folder / "model"), *options]) == 2
    assert message in capsys.readouterr().err


def test_no_message_of_an_option_is_in_the_words_of_pydantic(capsys):
    names = {*ServeSettings.model_fields, *NativeEngineSettings.model_fields}
    refused = 0
    for name in sorted(names - {"kind", "replicas", "recovery_timeout_s", "own_stable_reinforce"}):
        option = "--" + name.replace("_", "-")
        for text in ("x", "0.5", "-1000000000", "9" * 5000):
            assert main(["serve", "/nowhere", f"{option}={text}"]) == 2
            message = capsys.readouterr().err
            if not message.startswith("tailrace: model.path = '/nowhere': "):  # the option is right
                assert message.startswith(f"tailrace: {option} = {text!r}: ")
                assert not re.search(r"[Ii]nput |[Ss]hould |Value error", message)
                refused += 1
    assert refused > 40


def test_a_weak_token_is_refused_and_not_shown(folder, capsys, monkeypatch):
    monkeypatch.setenv("TAILRACE_TOKEN", "secret")
    assert main(["serve", str(folder / "model")]) == 2
    error = capsys.readouterr().err
    assert "at least 16 printable ASCII characters" in error
    assert "secret" not in error
