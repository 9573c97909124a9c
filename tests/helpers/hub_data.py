"""A server with the routes of the Hugging Face hub by which data sets are downloaded."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import pytest


class DataHub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.commits: dict[str, list[Mapping[str, bytes]]] = {}
        """The files of each commit of each data set, oldest first."""
        self.tags: dict[str, int] = {}
        """Numbers of commits."""
        self.asked: list[str] = []
        """The paths of all requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def commit_of(number: int) -> str:
    return f"{number + 1:040x}"


class _Routes(BaseHTTPRequestHandler):
    server: DataHub

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(path)
        kind, _, rest = path.removeprefix("/api").removeprefix("/").partition("/")
        name = "/".join(rest.split("/")[:2])
        if kind != "datasets" or name not in hub.commits:
            return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        what, revision, *file = [*rest.split("/", 4)[2:], "", "main"]
        shas = {commit_of(number): number for number in range(len(hub.commits[name]))}
        number = (shas | hub.tags | {"main": len(shas) - 1}).get(revision if what else "main")
        if number is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = hub.commits[name][number]
        if not path.startswith("/api"):
            content = files.get(file[0])
            head = {"X-Repo-Commit": commit_of(number)}
            if content is None:
                return self._answer(404, b"", {**head, "X-Error-Code": "EntryNotFound"})
            return self._answer(200, content, {**head, "ETag": f'"{_oid(content)}"'})
        listed = [
            {"type": "file", "path": each, "size": len(content), "oid": _oid(content)}
            for each, content in files.items()
        ]
        is_tree = what == "tree"
        self._answer(
            200, json.dumps(listed if is_tree else {"id": name, "sha": commit_of(number)}).encode(), {}
        )

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def data_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[DataHub]:
    """A hub for this process, with caches in `home`."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with DataHub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        yield hub
        hub.shutdown()


def parquet(rows: list[dict[str, object]]) -> bytes:
    import datasets

    file = BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(file)
    return file.getvalue()


def json_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
