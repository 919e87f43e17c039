"""Speaks JSON over HTTP with an inference server, with limits: each failure is one line that names the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.parse
from typing import Any

from mrl.errors import ConfigError, ServerError, quoted

TRIES = 4
"""How often a request is sent at most: again only if the server was not reached, hung up, or said that it is busy."""

FIRST_WAIT_S = 0.5
"""Before the second try; it doubles each time."""

CONNECT_S = 12.0
"""Longest wait for a connection: a host that is not there may say nothing at all."""

REACH_S = 2.0
"""Longest wait for a server that was away and may be there again."""

_BUSY = (429, 502, 503, 504)
_SHOWN = 300  # characters of a server's own words


class RequestAborted(Exception):
    """`HttpClient.abort_requests` was called: another request failed, and this answer is not wanted."""


class HttpClient:
    """A client of one server.

    - url: `http://host:port`, or https
    - timeout_s: the longest wait for an answer; a slower one is not asked again
    - key: names the server in messages
    - secret: sent as `Authorization: Bearer`, and hidden in messages; "" is none
    """

    def __init__(self, url: str, *, timeout_s: float, key: str = "rollout.server.urls", secret: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(key, quoted(url), "is not a server", "write it as http://host:8000")
        self._secret = secret
        self._key = key
        self.if_slow = f"raise {key.rpartition('.')[0]}.timeout_s, or see its log"
        self.url, self._host = url.rstrip("/"), host
        self._parts, self._timeout_s = urllib.parse.urlsplit(self.url), timeout_s
        self._open: set[http.client.HTTPConnection] = set()
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def another(self, timeout_s: float | None = None) -> HttpClient:
        """Returns a client of the same server whose requests end apart from these. timeout_s: a shorter wait."""
        seconds = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        client = HttpClient(self.url, timeout_s=seconds, key=self._key, secret=self._secret)
        client.if_slow = self.if_slow if seconds == self._timeout_s else "see its log"
        return client

    def get(self, path: str) -> Any:
        return self._answer("GET", path, None)

    def post(self, path: str, body: Any = None, *, tries: int = TRIES) -> Any:
        """Returns the answer's JSON, or its text if it is none. Raises ServerError. May be called from many threads.

        tries: 1 for a request that must not be done twice.
        """
        return self._answer("POST", path, body, tries=tries)

    def own_address(self) -> str:
        """Returns this machine's address as the server sees it."""
        return self._addresses()[0]

    def is_here(self) -> bool:
        """Returns whether the server's address is one of this machine."""
        own, server = self._addresses()
        return own == server

    def _addresses(self) -> tuple[str, str]:
        """Returns this machine's address and the server's on the route between them."""
        addresses = socket.getaddrinfo(self._host, self._parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # which sends nothing, over UDP
            return sock.getsockname()[0], sock.getpeername()[0]

    def is_reached(self) -> bool:
        """Returns whether something listens at its address; waits `REACH_S` at most."""
        port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        try:
            with socket.create_connection((self._host, port), timeout=REACH_S):
                return True
        except OSError:
            return False

    def abort_requests(self) -> None:
        """Ends the requests that are under way; they raise RequestAborted, and the server drops its work for them."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it may be closed already
                        connection.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads from it

    def allow_requests(self) -> None:
        """Undoes `abort_requests`."""
        self._stopped.clear()

    def _answer(self, method: str, path: str, body: Any, *, tries: int = TRIES) -> Any:
        wait_s = FIRST_WAIT_S
        for left in reversed(range(tries)):
            try:
                status, text = self._send(method, path, body)
                why = f"says HTTP {status}: {words(text)}"
            except TimeoutError:
                self._check_wanted()
                why = f"gave no answer in {self._timeout_s:g} s; {self.if_slow}"
                raise self.error(f"{path} {why}", lost=True) from None
            except (OSError, http.client.HTTPException) as error:
                status, why = None, f"cannot be reached ({type(error).__name__}: {error})"
            self._check_wanted()
            if status == 200:
                return parsed(text)
            if status is not None and status not in _BUSY:
                raise self.error(f"{path} {why}; see its log", status=status)
            if left:
                self._stopped.wait(wait_s)
                self._check_wanted()
                wait_s *= 2
        after = f", after {tries} tries" if tries > 1 else ""
        raise self.error(f"{path} {why}{after}; start it, or take it out of {self._key}", lost=True)

    def _send(self, method: str, path: str, body: Any) -> tuple[int, str]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._host, self._parts.port, timeout=min(CONNECT_S, self._timeout_s))
        try:
            try:
                connection.connect()
            except TimeoutError as error:
                raise ConnectionError(f"no connection in {connection.timeout:g} s") from error
            connection.sock.settimeout(self._timeout_s)
            with self._lock:
                self._open.add(connection)
            self._check_wanted()
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._secret:
                headers["Authorization"] = f"Bearer {self._secret}"
            connection.request(method, self._parts.path + path, body=data, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", errors="replace")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _check_wanted(self) -> None:
        if self._stopped.is_set():
            raise RequestAborted(self.url)

    def error(self, what: str, *, status: int | None = None, lost: bool = False) -> ServerError:
        """Returns an error about this server, in one line. status, lost: as of ServerError."""
        message = " ".join(what.split())
        if self._secret:  # a server may tell it
            message = message.replace(self._secret, "(hidden)")
        return ServerError(f"{self._key}: {self.url} {message}", status=status, lost=lost)


def parsed(text: str) -> Any:
    """Returns the JSON of a text, or the text if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def words(text: str) -> str:
    """Returns a server's text on one line: the message of its error if it has one."""
    content = parsed(text)
    for name in ("error", "message"):
        content = content.get(name, content) if isinstance(content, dict) else content
    return " ".join(str(content).split())[:_SHOWN]
