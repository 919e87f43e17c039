"""A web server of files on this machine, whose connections break, and which knows ranges or does not."""

from __future__ import annotations

import contextlib
import functools
import http.server
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any


class Site:
    """What is served from `folder` at `url`, and what was asked for.

    ranges: whether parts of files are given. breaks_after: bytes of an answer after which its connection ends; of the
    next answers, where there is a list of them. fails: an HTTP status that every request gets; 503 where the folder has
    a file `fails`, which another process may write. encoding: the Content-Encoding that answers name.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.ranges, self.breaks_after, self.fails, self.encoding = True, None, None, None
        self.asked: list[tuple[str, int]] = []  # file and first byte
        self.sent = 0  # bytes

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, site: Site, *args: Any) -> None:
        self.site = site
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        site, name = self.site, self.path.partition("?")[0].lstrip("/")
        path = site.folder / name
        fails = 503 if (site.folder / "fails").exists() else site.fails
        if fails is not None or not path.is_file():
            self.send_error(fails or 404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if site.ranges else None
        start, size = int(asked[1]) if asked else 0, path.stat().st_size
        site.asked.append((name, start))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(size - start))
        self.send_header("ETag", f'"{hash(path.read_bytes()) if size < 1 << 20 else size}"')
        if site.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if site.encoding:
            self.send_header("Content-Encoding", site.encoding)
        self.end_headers()
        most = site.breaks_after
        if isinstance(most, list):
            most = most.pop(0) if most else None
        left = size - start if most is None else min(most, size - start)
        with path.open("rb") as file, contextlib.suppress(ConnectionError):
            file.seek(start)
            while left and (block := file.read(min(left, 1 << 16))):
                self.wfile.write(block)
                left -= len(block)
                site.sent += len(block)
        self.close_connection = True


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[Site]:
    """Serves a folder on this machine while it is open."""
    site = Site(folder)
    with listening(functools.partial(Handler, site)) as site.root:
        yield site


@contextlib.contextmanager
def listening(handler: Any) -> Iterator[str]:
    """Answers by a handler of `http.server` while it is open, at the URL that it yields."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
