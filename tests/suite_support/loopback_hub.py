"""A small Hugging Face hub on loopback, for the library of the hub: repositories with files, without history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

COMMIT = "1" * 40
PART = 1 << 16


class LoopbackHub:
    """``files`` are those of the only repository. Changes of the attributes take effect with the next request."""

    def __init__(self, repo: str, files: Mapping[str, bytes]) -> None:
        self.repo = repo
        self.files = dict(files)
        self.stated: dict[str, str] = {}
        """Checksums that differ from those of the contents, by file."""
        self.asked: list[str] = []
        """All requests."""
        self.may_finish = Event()
        """A file is sent up to its half until this is set."""
        self.may_finish.set()
        self.url = ""

    @property
    def downloads(self) -> list[str]:
        """The files that were downloaded, by name; the library downloads several at a time."""
        return sorted(each.rpartition(f"{COMMIT}/")[2] for each in self.asked if each.startswith(f"GET /{self.repo}/"))

    @contextmanager
    def serving(self) -> Iterator[LoopbackHub]:
        """Serves at ``url``."""
        handler = type("Handler", (_Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = Thread(target=server.serve_forever, daemon=True)
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                self.may_finish.set()
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        if self.path.startswith(f"/api/models/{self.hub.repo}"):
            self._list()
            return
        repo, _, rest = self.path[1:].partition("/resolve/")
        name = rest.partition("/")[2]
        content = self.hub.files.get(name) if repo == self.hub.repo else None
        self.send_response(200 if content is not None else 404)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound" if repo == self.hub.repo else "RepoNotFound")
        else:
            stated = self.hub.stated.get(name, hashlib.sha256(content).hexdigest())
            self.send_header("ETag", f'"{stated}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if has_body and content:
            self._send(content)

    def _list(self) -> None:
        tree = [{"type": "file", "path": name, "size": len(text), "oid": ""} for name, text in self.hub.files.items()]
        info = {"id": self.hub.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.hub.files]}
        body = json.dumps(tree if "/tree/" in self.path else info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, content: bytes) -> None:
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        self.hub.may_finish.wait()
        self.wfile.write(content[half:])
