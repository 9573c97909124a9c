"""`tailrace view`: what it refuses, what it writes, and to whom it answers."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tailrace.cli import main
from tailrace.importing import install
from tailrace.record.events import RequestEnded, RequestStarted
from tailrace.record.run_log import LogWriter
from tailrace.types import SampleId

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="no page: pip install 'tailrace[view]'")

TOKEN = "of-this-server"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run that was killed after its first request. Its sample's text is hostile."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "metrics.jsonl").write_text('{"step": 1, "round": 0, "loss": 0.5, "wall_time": 1.0}\n')
    writer, sample_id = LogWriter(folder / "events.jsonl"), SampleId(0, 0, 0)
    writer.on(RequestStarted(0.0, sample_id, "engine-0", 0))
    writer.on(RequestEnded(5.0, sample_id, "engine-0", 5, 5, "stop"))
    writer.close()
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"event":"Samp')
    sample = {
        "id": "0.0/0",
        "step": 1,
        "reward": 1.0,
        "num_tokens": 5,
        "finish_reason": "stop",
        "spans": [[0, 5]],
    }
    hostile = sample | {"text": "</script><script>alert(1)</script><!--"}
    (folder / "samples" / "round_000000.jsonl").write_text(json.dumps(hostile) + "\n")
    return folder


def test_a_page_as_one_file_has_everything_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run.parent / "page.html"
    before = sorted(run.rglob("*"))
    assert main(["view", str(run), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"page      {page}\n"
    text = page.read_text()
    assert "uPlot (v1.6" in text and re.findall(r'(?:src|href)="(?!data:)[^"]*"', text[:2_000]) == []
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    (found,) = json.loads(data)["runs"]
    requests = [request[4] for lane in found["windows"][0]["lanes"] for request in lane.get("requests", ())]
    assert requests == ["0.0/0"] and found["record"]["defects"][0]["line"] == 4
    assert found["sample"]["0.0/0"]["record"]["text"].startswith("</script>")
    assert sorted(run.rglob("*")) == before  # a run is only read


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN/samples"], "it has neither events.jsonl nor metrics.jsonl"),
        (["RUN", "--output", "RUN"], "--output = 'RUN': it is a folder"),
        (["RUN", "--perfetto", "RUN"], "--perfetto = 'RUN': it is a folder"),
        (["RUN/samples", "--perfetto", "RUN/t.json"], "it has no events.jsonl"),
        (["RUN", "RUN", "--perfetto", "RUN/t.json"], "a trace is of one run"),
        (["RUN", "--port", "70000"], "--port = 70000: there is no such port"),
        (["RUN", "--run.rounds", "3"], "view has no config to override"),
    ],
)
def test_what_cannot_work_is_refused(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *(word.replace("RUN", str(run)) for word in words)]) == 2
    assert message.replace("RUN", str(run)) in capsys.readouterr().err


def test_a_damaged_run_log_is_a_sentence_of_the_page_and_no_trace(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = (run / "events.jsonl").read_text().replace('"RequestStarted"', '"RequestStartee"')
    (run / "events.jsonl").write_text(log)
    said = "line 2 of events.jsonl: it is no event of this version"
    assert main(["view", str(run), "--perfetto", str(tmp_path / "trace.json")]) == 2
    assert said in capsys.readouterr().err
    assert main(["view", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert said in (tmp_path / "page.html").read_text()


def test_the_events_as_a_trace_for_perfetto(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "trace.json"
    assert main(["view", str(run), "--perfetto", str(path)]) == 0
    assert capsys.readouterr().out == f"trace     {path}  (open it at ui.perfetto.dev)\n"
    (request,) = (
        each for each in json.loads(path.read_text()) if each["name"] == "group 0" and each["pid"] == 2
    )
    assert (request["ts"], request["dur"]) == (0, 5_000_000)


def test_a_missing_package_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["view", str(run)]) == 2
    assert install("view") in capsys.readouterr().err


async def test_the_server_answers_get_only_and_this_machine_only(run: Path) -> None:
    from tailrace.extras.view.app import make_app
    from tailrace.extras.view.run import open_runs

    transport = httpx.ASGITransport(app=make_app(open_runs([run]), TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:1/{TOKEN}") as client:
        page = await client.get("/")
        assert page.status_code == 200 and "<title>tailrace</title>" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.request(method, "/runs/0")).status_code == 405
        for host in ("evil.example", "127.0.0.1.evil.example:1", "192.168.0.1"):
            assert (await client.get("/", headers={"host": host})).status_code == 400
        assert (await client.get("/", headers={"host": "localhost:8000"})).status_code == 200
        assert (await client.get("/runs/7")).status_code == 404
        for address in (
            "/",
            "/runs/0",
            "/runs/0/samples",
            f"/{TOKEN}x/",
            f"/x{TOKEN}/runs/0",
            "//runs/0",
        ):
            found = await client.get(f"http://127.0.0.1:1{address}")
            assert (found.status_code, "view printed" in found.text) == (403, True), address
        assert "unsafe-eval" not in page.headers["content-security-policy"]
        assert (await client.get("/runs/0")).json()["y"]["loss"] == [[0.5]]
        assert (await client.get("/runs/0/figure?name=loss")).json() == [[0.5]]
        window = (await client.get("/runs/0/window?from=0&to=5&bins=10")).json()
        assert [lane["name"] for lane in window["lanes"]] == ["trainer", "engine-0"]
        for bad in ("from=0&to=5", "from=0&to=5&bins=x", "from=5&to=0&bins=9", "from=0&to=nan&bins=9"):
            assert (await client.get(f"/runs/0/window?{bad}")).status_code == 400
        (listed,) = (await client.get("/runs/0/samples")).json()["samples"]
        assert (listed["id"], listed["reward"]) == ("0.0/0", 1.0)
        found = (await client.get("/runs/0/sample?id=0.0/0")).json()
        assert found["record"]["reward"] == 1.0
        other = (await client.get("/runs/0/sample?id=../../config.toml")).json()
        assert (other["source"], other["record"]) == ("", {})


async def test_a_browser_that_has_the_page_is_sent_nothing(run: Path) -> None:
    from tailrace.extras.view.app import make_app
    from tailrace.extras.view.run import open_runs

    os.utime(run / "metrics.jsonl", (1.0, 1.0))
    (run / "summary.json").write_text("{}")  # it has ended, so no text says how long it is silent
    transport = httpx.ASGITransport(app=make_app(open_runs([run]), TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:1/{TOKEN}") as client:
        first = await client.get("/runs/0/record")
        known = {"If-None-Match": first.headers["ETag"]}
        again = await client.get("/runs/0/record", headers=known)
        assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
        log = (run / "events.jsonl").read_text().replace('{"event":"Samp', "")
        (run / "events.jsonl").write_text(log)
        assert (await client.get("/runs/0/record", headers=known)).json()["defects"] == []
        with (run / "events.jsonl").open("a") as added:
            added.write('{"event":"Sang"}\n')
        (defect,) = (await client.get("/runs/0/record", headers=known)).json()["defects"]
        assert "line 4 of events.jsonl" in defect["problem"]


def test_it_serves_until_a_signal_comes(run: Path) -> None:
    words = [sys.executable, "-m", "tailrace.cli", "view", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().split()[1]
        assert httpx.get(f"{address}runs/0").json()["name"] == "run"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "tailrace: the page is no longer served\n")
    finally:
        process.kill()
        process.wait()
