"""A server with the routes of the Hugging Face hub that an upload uses, and git LFS' basic transfer."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_the_test"
LFS = "application/vnd.git-lfs+json"


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.repos: dict[str, dict[str, bytes]] = {}
        """The files of each repository."""
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        """LFS objects by their SHA-256."""
        self.commits = 0
        self.refuses: tuple[str, int] | None = None
        """Part of a route, and the status with which it is refused."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Routes(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        if self._refused():
            return
        path, hub = self.path.partition("?")[0], self.server
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            there = repo in hub.repos
            hub.repos.setdefault(repo, {})
            is_private = asked.get("private") or asked.get("visibility") == "private"
            hub.private |= {repo} if is_private and not there else set()
            url = {"url": f"{hub.url}/{repo}"}
            self._answer(409 if there else 200, url | ({"error": "You already created it"} if there else {}))
        elif path.endswith("/preupload/main"):
            files = [each["path"] for each in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            told = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._answer(200, {"files": told})
        elif path.endswith(".git/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            self._answer(200, {"transfer": "basic", "objects": [self._place(each) for each in asked]}, LFS)
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer(404, {"error": f"no route {path}"})

    def do_PUT(self) -> None:
        content = self._body()
        if self._refused():
            return
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() == oid:
            self.server.objects[oid] = content
            self._answer(200, {})
        else:
            self._answer(400, {"error": "other content"})

    def do_GET(self) -> None:
        if not self._refused():
            self._answer(404, {"error": "Repository not found"})

    def _place(self, asked: dict[str, object]) -> dict[str, object]:
        """An object that the hub has already is not uploaded again."""
        oid = str(asked["oid"])
        action = {"upload": {"href": f"{self.server.url}/lfs/{oid}", "header": {}}}
        return asked | ({} if oid in self.server.objects else {"actions": action})

    def _commit(self, repo: str, body: bytes) -> None:
        files, hub = {}, self.server
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
        hub.repos[repo] |= files
        hub.commits += 1
        oid = f"{hub.commits:040x}"
        self._answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid})

    def _refused(self) -> bool:
        part, status = self.server.refuses or ("no route", 0)
        if part in self.path:
            self._answer(status, {"error": "You may not do this"})
        elif self.path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return False
        else:
            self._answer(401, {"error": "Invalid username or password."})
        return True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, object], kind: str = "application/json") -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
