"""A conversion that is killed, or whose disk fills up, leaves nothing that looks whole; run again, it goes on and ends the same.

Each conversion runs in a fork of this process, which kills itself with SIGKILL as its n-th event begins. Events are what it
does to disk, in every thread: blocks written, files and folders synced, renamed and removed.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

import pytest

from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.engine.torch_dist.data_files import ItemFile
from mrl.errors import ModelError
from tests.convert import hf_folders

EVENTS = (
    (ItemFile, "write"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (pathlib.Path, "write_text"),
)  # fmt: skip
FAST_KILLS, SLOW_KILLS = 3, 20


def in_fork(convert: Callable[[], object], kill_at: int | None = None) -> tuple[int, int]:
    """(events, blocks written) of `convert` in a fork; the fork has to end by SIGKILL where `kill_at` is given."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            counts = _count_events(kill_at)
            convert()
            os.write(write_end, json.dumps(counts).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as out:
        said = out.read()
    _, status = os.waitpid(child, 0)
    if kill_at is not None:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        return 0, 0
    assert status == 0, status
    counts = json.loads(said)
    return sum(counts.values()), counts["write"]


def _count_events(kill_at: int | None) -> dict[str, int]:
    counts = {name: 0 for _, name in EVENTS}
    lock = threading.Lock()

    def watched(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            with lock:
                if sum(counts.values()) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                counts[name] += 1
            return original(*args, **kwargs)

        return call

    for owner, name in EVENTS:
        setattr(owner, name, watched(name, getattr(owner, name)))
    return counts


@pytest.fixture(scope="module")
def conversion(hf, tmp_path_factory):
    """Command -> (the conversion, a whole result of it, its events, its blocks)."""

    @functools.cache
    def of(command):
        source, folder = hf("qwen3_moe", shard="15KB"), tmp_path_factory.mktemp(command)
        if command == "export":
            import_hf(source, folder / "mcore", file_bytes=8_000)

        def convert(out: pathlib.Path) -> object:
            if command == "import":
                return import_hf(source, out, file_bytes=8_000)
            return export_hf(folder / "mcore", out)

        return convert, folder / "whole", *in_fork(lambda: convert(folder / "whole"))

    return of


KILLS = [(command, seed) for command in ("import", "export") for seed in range(SLOW_KILLS)]


@pytest.mark.parametrize(
    ("command", "seed"),
    [pytest.param(*kill, marks=[] if kill[1] < FAST_KILLS else pytest.mark.nightly) for kill in KILLS],
)
def test_a_kill_leaves_nothing_that_looks_whole(conversion, tmp_path, command, seed):
    convert, whole, events, blocks = conversion(command)
    # a seed's own part of the conversion, so that few seeds meet begin, middle and end
    share = events / FAST_KILLS if seed < FAST_KILLS else events / SLOW_KILLS
    kill_at = min(int((seed + random.Random(seed).random()) * share), events - 1)
    in_fork(lambda: convert(tmp_path / "out"), kill_at)
    if (tmp_path / "out").exists():  # killed after the rename: it is whole but for notes of its making
        assert set(hf_folders.files_of(whole)) <= set(hf_folders.files_of(tmp_path / "out"))
    else:
        assert {p.name for p in tmp_path.iterdir()} <= {".out.converting"}
        _, again = in_fork(lambda: convert(tmp_path / "out"))
        assert again <= blocks
        assert not (tmp_path / ".out.converting").exists()
        assert hf_folders.files_of(tmp_path / "out").keys() == hf_folders.files_of(whole).keys()
    for name, content in hf_folders.files_of(whole).items():
        if name.endswith((".distcp", ".safetensors", ".json")):
            assert (tmp_path / "out" / name).read_bytes() == content, name


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_was_finished_is_not_written_again(conversion, hf, tmp_path, command):
    convert, _, events, blocks = conversion(command)
    in_fork(lambda: convert(tmp_path / "out"), int(events * 0.7))
    finished = [p for p in (tmp_path / ".out.converting").rglob("*") if p.suffix in (".distcp", ".safetensors")]
    assert len(finished) > 2
    finished[0].write_bytes(finished[0].read_bytes()[:-1] + b"\0")  # what a broken disk made of it is
    _, again = in_fork(lambda: convert(tmp_path / "out"))
    assert 0 < again < blocks * 0.7
    checked = tmp_path / "checked"
    (export_hf if command == "import" else import_hf)(tmp_path / "out", checked)
    if command == "import":
        assert hf_folders.differences(hf("qwen3_moe", shard="15KB"), checked) == []


def test_another_source_begins_anew(hf, tmp_path):
    first, second = hf("qwen3_moe", shard="15KB"), tmp_path / "second"
    shutil.copytree(hf("qwen3_moe", shard="15KB", seed=1), second)
    in_fork(lambda: import_hf(first, tmp_path / "out", file_bytes=8_000), 150)
    assert any((tmp_path / ".out.converting/mcore").iterdir())
    import_hf(second, tmp_path / "out", file_bytes=8_000)
    export_hf(tmp_path / "out", tmp_path / "back")
    assert hf_folders.differences(second, tmp_path / "back") == []
    events, _ = in_fork(lambda: export_hf(tmp_path / "out", tmp_path / "counted"))
    in_fork(lambda: export_hf(tmp_path / "out", tmp_path / "again"), int(events * 0.7))
    shutil.rmtree(tmp_path / "out")
    import_hf(first, tmp_path / "out", file_bytes=8_000)  # of the same names and shapes
    export_hf(tmp_path / "out", tmp_path / "again")
    assert hf_folders.differences(first, tmp_path / "again") == []


def test_a_source_that_changes_meanwhile_gives_nothing(hf, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(hf("qwen3_moe", shard="15KB"), source)
    last = max(source.glob("*.safetensors"))

    def progress(total):
        return lambda count: os.utime(last)  # as one who writes the same number of bytes again does

    with pytest.raises(ModelError, match="changed while it was converted"):
        import_hf(source, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()
    import_hf(source, tmp_path / "out")


def test_two_at_once_are_refused(hf, tmp_path):
    source, said = hf("llama"), []

    def progress(total):
        def second(count):
            if not said:
                with pytest.raises(ModelError, match="another conversion is writing it") as caught:
                    import_hf(source, tmp_path / "out")
                said.append(str(caught.value))

        return second

    import_hf(source, tmp_path / "out", progress=progress)
    assert said


FULL = """
import os, pathlib, shutil, sys
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.errors import UserError

disk, source = pathlib.Path(sys.argv[1]), sys.argv[2]


def fill(but):
    free = os.statvfs(disk)
    with open(disk / "filler", "wb") as out:
        out.write(b"x" * (free.f_bavail * free.f_frsize - but))


def progress(total):
    def taken(count):  # somebody else takes the rest of the disk when the conversion has begun
        if not (disk / "filler").exists():
            fill(40_000)
    return taken


def refused(convert, **options):
    try:
        convert(**options)
    except UserError as error:
        print("REFUSED", error)
    assert not (disk / "out").exists()
    (disk / "filler").unlink()


for convert in (
    lambda **options: import_hf(source, disk / "out", file_bytes=20_000, **options),
    lambda **options: export_hf(sys.argv[3], disk / "out", max_shard_size=20_000, **options),
):
    fill(60_000)
    refused(convert)
    print("LEFT", sorted(path.name for path in disk.iterdir()))
    refused(convert, progress=progress)
    print("LEFT", sorted(path.name for path in disk.iterdir()))
    convert()
    print("LEFT", sorted(path.name for path in disk.iterdir()))
    shutil.rmtree(disk / "out")
"""


@pytest.mark.slow
def test_a_disk_that_fills_up(hf, tmp_path):
    """On a real, small file system in a mount namespace of its own: too small from the start, and filled on the way."""
    source, disk = hf("qwen3_moe"), tmp_path / "disk"
    import_hf(source, tmp_path / "mcore")
    disk.mkdir()
    (tmp_path / "full.py").write_text(FULL)
    words = " ".join(map(str, (sys.executable, tmp_path / "full.py", disk, source, tmp_path / "mcore")))
    command = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=2m none {disk} && {words}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("REFUSED")]
    left = [line for line in lines if line.startswith("LEFT")]
    assert len(refused) == 4 and left == ["LEFT []", "LEFT ['.out.converting']", "LEFT ['out']"] * 2
    for early, late in (refused[:2], refused[2:]):
        assert re.search(
            rf"/out: needs \d+\.\d kB and the disk of {disk} has \d+\.\d kB free; make room, or give", early
        )
        assert "the disk is full" in late and "run the same command again" in late
