"""A hub on this machine: one data set, whose branch `main` is at the last of its commits, asked as huggingface_hub asks."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.data.web import listening


class Hub:
    """commits: by their ids, the files of the data set `REPO`: content by path. asked: paths of all requests."""

    REPO = "someone/rows"

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.url = ""
        self.asked: list[str] = []

    def push(self, files: dict[str, bytes]) -> str:
        """Returns the id of a new commit."""
        commit = hashlib.sha1(repr((len(self.commits), files)).encode()).hexdigest()
        self.commits[commit] = files
        return commit

    def answer(self, path: str) -> Any:
        """Returns what is at a path: bytes, or what is told as JSON; None for nothing."""
        self.asked.append(path)
        last = list(self.commits)[-1]
        if found := re.fullmatch(rf"/api/datasets/{self.REPO}(/revision/([^/]+))?", path):
            return {"id": self.REPO, "sha": last if found[2] in (None, "main") else found[2], "siblings": []}
        if found := re.fullmatch(rf"/api/datasets/{self.REPO}/(tree|paths-info)/([^/]+)(/.*)?", path):
            files = self.commits[last if found[2] == "main" else found[2]]
            folders = [{"type": "directory", "path": "data", "oid": found[2], "size": 0}] if not found[3] else []
            return folders + [
                {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for name, text in files.items()
            ]
        if found := re.fullmatch(rf"/datasets/{self.REPO}/resolve/([^/]+)/(.*)", path):
            return self.commits[last if found[1] == "main" else found[1]].get(found[2])
        return None


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serves a hub on this machine while it is open."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = hub.answer(urllib.parse.unquote(self.path.partition("?")[0]))
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if part and isinstance(found, bytes):
                content = content[int(part[1]) : int(part[2] or len(content)) + 1]
            self.send_response(404 if found is None else 206 if part else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

    with listening(Handler) as hub.url:
        yield hub
