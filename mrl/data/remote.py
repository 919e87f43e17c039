"""Remote files, found by URL or hub id, and read as one stream of bytes.

    https://host/rows.jsonl.gz            one file; `http` too
    hf://datasets/NAME/data/*.parquet     a file, folder or glob of any file system that fsspec has (s3, gs, ...)
    openai/gsm8k:main                     the files that `datasets` finds for a split of a hub id

Nothing is copied to the disk. A broken connection is opened again at the byte where it broke.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import datasets
import fsspec
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

from mrl.config.urls import HIDDEN, shown_url
from mrl.data.files import SUFFIXES, hash_of_ends
from mrl.errors import DataError

WAITS_S = (1, 2, 4, 8, 16, 30)
"""Seconds before each further try to read, after which a source is given up."""
WAITS_TO_FIND_S = (1, 2)  # the same, before anything was read: an address may be wrong
TIMEOUT_S = 60  # of a connection that says nothing
SKIPPED_AT_MOST = 1 << 20  # bytes that are read and forgotten where a new request would take longer
ENDS = 1 << 16  # bytes hashed at each end of a file on this machine
WRONG_STATUS = range(400, 500)  # of HTTP: the request is wrong, and so is the next one
TRY_AGAIN = (408, 425, 429)
_QUERY = re.compile(r"(/[^\s?]*)\?\S+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class SourceError(DataError):
    """A source that is read while training cannot be read any more: no row's fault. The same run can go on later."""


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of rows. url: of it, or its path on this machine."""

    url: str
    size: int | None  # bytes; None where the server does not say
    tag: str  # what the server knows its content by, or a hash of its ends
    open_at: Callable[[int], tuple[BinaryIO, int]] = dataclasses.field(compare=False)
    """Returns the open file, and the place in it: that which was asked for, or 0 of a server without ranges."""

    @property
    def name(self) -> str:
        """The URL as it is shown."""
        return shown_url(self.url)

    def open(self, key: str, ended: threading.Event) -> io.BufferedReader:
        """Returns its bytes from the beginning. key: of the config, for errors. ended: once set, nothing is retried."""
        return io.BufferedReader(_ReopeningFile(self, key, ended), 1 << 20)


class _ReopeningFile(io.RawIOBase):
    """Reads a file, and opens a broken one again at its next byte, once for each of `WAITS_S`. Raises SourceError."""

    def __init__(self, file: RemoteFile, key: str, ended: threading.Event) -> None:
        self.of, self.key, self._ended = file, key, ended
        self._at = 0  # the place that is read next, and that which the open file is at
        self._file_at = 0
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.of.size is not None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.of.size or 0)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        for wait in (*WAITS_S, None):
            try:
                data = self._read(len(buffer))
                buffer[: len(data)] = data
                self._at += len(data)
                return len(data)
            except Exception as error:  # each library raises its own, and all mean that the bytes did not come
                self._close()
                if wait is None or not is_transient(error) or is_ending() or self._ended.wait(wait):
                    raise read_failure(self.key, self.of.url, error) from error
        raise AssertionError("every try returns or raises")

    def _read(self, most: int) -> bytes:
        if self.of.size is not None and self._at >= self.of.size:
            return b""
        if self._file is not None and not 0 <= self._at - self._file_at <= SKIPPED_AT_MOST:
            self._close()
        if self._file is None:
            self._file, self._file_at = self.of.open_at(self._at)
        while self._file_at < self._at:
            self._file_at += len(self._more(self._file, min(self._at - self._file_at, SKIPPED_AT_MOST)))
        data = self._more(self._file, most)
        self._file_at += len(data)
        return data

    def _more(self, file: BinaryIO, most: int) -> bytes:
        """Returns the next bytes. Raises ConnectionError if a file ends too early."""
        data = file.read(most)
        if not data and (self.of.size is not None or self._file_at < self._at):
            raise ConnectionError(f"the connection ended at byte {self._file_at:,} of {self.of.size}")
        return data

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._close()
        super().close()


def is_ending() -> bool:
    """Returns whether the process is ending. Its end waits for reading threads."""
    return not threading.main_thread().is_alive()


def is_transient(error: Exception) -> bool:
    """Returns whether the same request may succeed later."""
    if isinstance(error, OfflineModeIsEnabled | FileNotFoundError | PermissionError | ValueError | ImportError):
        return False
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return not (status in WRONG_STATUS and status not in TRY_AGAIN)


def read_failure(key: str, url: str, error: Exception) -> SourceError:
    """Returns the line on a file that cannot be read. key: of the config."""
    fix = "check the address (a signed one expires) and the network, and start the same command again"
    return SourceError(key, why=f"{shown_url(url)} cannot be read ({error_text(error)})", fix=fix)


def error_text(error: Exception) -> str:
    """Returns the type and the text of an exception on one line, without the query (`?...`) of addresses.

    Libraries quote the file's address, the part after its host, or the signed address of a redirect.
    """
    text = _QUERY.sub(rf"\1{HIDDEN}", str(error))
    return f"{type(error).__name__}: {text}"


def _tried(key: str, url: str, fn: Callable[[], Any]) -> Any:
    """Calls `fn` several times until it works. Returns its result."""
    for wait in (*WAITS_TO_FIND_S, None):
        try:
            return fn()
        except DataError:
            raise
        except Exception as error:  # as in `_ReopeningFile.readinto`
            if wait is None or not is_transient(error):
                raise read_failure(key, url, error) from error
            time.sleep(wait)
    raise AssertionError("every try returns or raises")


# ------------------------------------------------------------------------------------------------------------- finding


def find_files(path: str, *, split: str | None, key: str) -> list[RemoteFile]:
    """Returns the files of a URL or hub id in the order of their names. Raises DataError where there are none."""
    address = r"[^\s@/]+(/[^\s]*)?"
    if path.startswith(("http://", "https://")) and not re.fullmatch(address, path.partition("://")[2]):
        why = f"{shown_url(path).rpartition('@')[2]} is no address"
        raise DataError(key, why=why, fix="give https://HOST/PATH without spaces and login")
    if "://" in path:
        files = _tried(key, path, lambda: _files_at(path, key))
    else:
        files = _tried(key, path, lambda: _hub_files(path, split, key))
    if split is not None and "://" in path:
        why = f"{split!r}, but {shown_url(path)} names files, which have no splits"
        raise DataError(f"{key}, split", why=why, fix="leave split out and name the files of that split")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            fix = f"give files that end in {', '.join(SUFFIXES)}, or leave stream out"
            raise DataError(key, why=f"{file.name} is of no form that can be streamed", fix=fix)
    return files


def local_file(path: str) -> RemoteFile:
    """Returns a file on this machine."""

    def open_at(offset: int) -> tuple[BinaryIO, int]:
        opened = open(path, "rb")  # noqa: SIM115  the stream closes it
        return opened, opened.seek(offset)

    return RemoteFile(path, os.path.getsize(path), hash_of_ends(path, ENDS), open_at)


def http_file(url: str) -> RemoteFile:
    """Returns the file at a URL. It is asked for as it is read later: a signed URL may be of GET alone."""
    tags: list[str] = []  # of the file, as it was found

    def open_at(offset: int) -> tuple[http.client.HTTPResponse, int]:
        asked = {"Accept-Encoding": "identity", "User-Agent": "mrl"} | ({"Range": f"bytes={offset}-"} if offset else {})
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=asked), timeout=TIMEOUT_S)
        if tags and _tag(answer) != tags[0]:
            answer.close()
            raise ValueError("the file was replaced since this run found it")
        return answer, offset if answer.status == 206 else 0

    answer, _ = open_at(0)
    with answer:
        tags.append(_tag(answer))
        length = answer.headers.get("Content-Length")
    return RemoteFile(url, None if length is None else int(length), tags[0], open_at)


def _tag(answer: http.client.HTTPResponse) -> str:
    """Returns the server's tag of a file's content; "" if it gives none."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _fsspec_files(path: str, key: str) -> list[RemoteFile]:
    """Returns files of any file system that fsspec has."""
    try:
        system, root = fsspec.url_to_fs(path)
    except (ValueError, ImportError) as error:
        why = f"{shown_url(path)} is of no file system that fsspec has here ({error_text(error)})"
        raise DataError(key, why=why, fix="give a URL of https or hf, or install the package that it names") from error
    root = _pinned(system, root)
    if any(c in root for c in "*?["):
        entries = list(system.glob(root, detail=True).values())
    elif system.isdir(root):
        entries = [info for info in system.ls(root, detail=True) if info["name"].endswith(SUFFIXES)]
    else:
        entries = [system.info(root)]
    files = sorted((info for info in entries if info["type"] == "file"), key=lambda info: info["name"])
    if not files:
        fix = f"give files that end in {', '.join(SUFFIXES)}, as hf://datasets/NAME/data/*.parquet"
        raise DataError(key, why=f"{shown_url(path)}: no file matches", fix=fix)
    return [_fsspec_file(system, info) for info in files]


def _pinned(system: Any, root: str) -> str:
    """Returns a path of the hub with its branch's present commit, so that later pushes are not read.

    A path of another file system or of a bucket of the hub stays as it is, and so does a path with a commit.
    """
    found = system.resolve_path(root) if isinstance(system, HfFileSystem) else None
    if not isinstance(found, HfFileSystemResolvedRepositoryPath):
        return root
    if _COMMIT.fullmatch(found.revision):  # as `datasets` names each of its files
        return root
    hub = HfApi(endpoint=system.endpoint, token=system.token)
    commit = hub.repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type).sha
    return f"{found.root.partition('@')[0]}@{commit}/{found.path_in_repo}".rstrip("/")


def _fsspec_file(system: Any, info: dict[str, Any]) -> RemoteFile:
    def open_at(offset: int) -> tuple[BinaryIO, int]:
        opened = system.open(info["name"], "rb")
        if offset:
            opened.seek(offset)
        return opened, offset

    known = [info[name] for name in ("ETag", "etag", "blob_id", "sha256", "checksum", "mtime") if info.get(name)]
    return RemoteFile(system.unstrip_protocol(info["name"]), info.get("size"), str(known[0]) if known else "", open_at)


def _hub_files(path: str, split: str | None, key: str) -> list[RemoteFile]:
    """Returns the files of one split of a hub id, as `datasets` finds them."""
    name, _, configuration = path.partition(":")
    try:
        files = datasets.load_dataset_builder(name, configuration or None).config.data_files
    except Exception as e:  # no network, no such id, a broken card: the library has no common error
        why = f"{path}: is no URL, file or folder, and datasets cannot find it as a hub id ({error_text(e)})"
        raise SourceError(key, why=why, fix="give a URL, a local glob, or a hub id, as openai/gsm8k:main") from e
    wanted = split or "train"
    if not files or wanted not in files:
        fix = "set split to one of them" if files else "name its files by hf://datasets/..."
        has = ", ".join(map(str, files or ())) or "none"
        raise DataError(key, why=f"{path} has no files of a split {wanted}; it has {has}", fix=fix)
    return [file for url in files[wanted] for file in _files_at(url, key)]


def _files_at(url: str, key: str) -> Sequence[RemoteFile]:
    if url.startswith(("http://", "https://")):
        return [http_file(url)]
    return _fsspec_files(url, key) if "://" in url else [local_file(url)]
