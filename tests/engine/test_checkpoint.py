"""The checkpoint folder is whole or absent: damaged, foreign, killed at every file operation, copied elsewhere."""

import builtins
import json
import logging
import os
import pathlib
import shutil
import threading

import fsspec
import pytest

from mrl.engine import atomic_checkpoint, checkpoint_remote
from mrl.engine.atomic_checkpoint import MARKER, find_checkpoint, validate, verify, writing
from mrl.errors import CheckpointError, DamagedCheckpoint


def save(root, step, *, content=b"weights", keep=None, backend="fsdp"):
    with writing(str(root), step, backend=backend, keep=keep) as folder:
        os.makedirs(os.path.join(folder, "model"))
        for name, data in {"model/shard0": content, "model/shard1": content * 2, "state.json": b"{}"}.items():
            with open(os.path.join(folder, name), "wb") as out:
                out.write(data)
    return os.path.join(str(root), atomic_checkpoint.step_name(step))


def names(root):
    return sorted(os.listdir(root))


def test_a_save_is_found_and_latest_names_it(tmp_path):
    assert find_checkpoint(str(tmp_path / "none")) is None
    path = save(tmp_path, 100)
    assert find_checkpoint(str(tmp_path)) == path and find_checkpoint(path) == path
    assert names(tmp_path) == ["latest", "step_00000100"]
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    marker = validate(path, backend="fsdp")
    assert (marker.step, marker.backend) == (100, "fsdp")
    assert list(marker.files) == ["model/shard0", "model/shard1", "state.json"]


def test_the_last_n_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]


def test_order_is_of_time_not_of_steps(tmp_path):
    """A run resumed from step 1 after step 9 was saved goes on from its own newest save, and keeps that one."""
    save(tmp_path, 1), save(tmp_path, 9)
    newest = save(tmp_path, 2, keep=1)
    assert find_checkpoint(str(tmp_path)) == newest
    assert names(tmp_path) == ["latest", "step_00000002"]


def test_leftovers_of_a_kill_are_removed_by_the_next_save(tmp_path):
    for name in (".tmp-step_00000003", ".trash-step_00000001"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "shard0").write_bytes(b"half")
    save(tmp_path, 4)
    assert names(tmp_path) == ["latest", "step_00000004"]


def write_marker(path, content):
    pathlib.Path(path, MARKER).write_text(content)


def edit_marker(path, **fields):
    write_marker(path, json.dumps({**json.loads(pathlib.Path(path, MARKER).read_text()), **fields}))


DAMAGES = {
    "missing file": (lambda p: os.remove(f"{p}/model/shard0"), "damaged: model/shard0 is missing"),
    "truncated file": (
        lambda p: os.truncate(f"{p}/model/shard1", 3),
        "damaged: model/shard1 has 3 bytes and was saved with 14",
    ),
    "changed content": (
        lambda p: pathlib.Path(p, "model/shard0").write_bytes(b"WEIGHTS"),
        "damaged: the content of model/shard0 has changed",
    ),
    "no marker": (lambda p: os.remove(f"{p}/{MARKER}"), "not a whole checkpoint of mrl: it has no COMPLETE file"),
    "foreign marker": (lambda p: write_marker(p, '{"step": 1}'), "damaged or foreign"),
    "other format": (lambda p: edit_marker(p, format="other"), "foreign: COMPLETE is not that of an mrl checkpoint"),
    "file outside": (lambda p: edit_marker(p, files={"../state.json": {"size": 2}}), "foreign: COMPLETE"),
    "newer version": (lambda p: edit_marker(p, version=99), "has checkpoint format 99"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(tmp_path, name, caplog):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage, message = DAMAGES[name]
    damage(bad)
    with pytest.raises(CheckpointError) as error:
        validate(bad)
    assert message in str(error.value) and bad in str(error.value) and "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(str(tmp_path)) == good
    assert message in caplog.text and bad in caplog.text


def test_the_other_backend_and_a_missing_folder_are_named(tmp_path):
    path = save(tmp_path, 1, backend="megatron")
    with pytest.raises(CheckpointError, match="saved by the megatron engine and this is the fsdp engine"):
        validate(path, backend="fsdp")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        validate(str(tmp_path / "nowhere"))


def test_all_ranks_write_into_one_folder(tmp_path):
    """Rank 0 alone makes, marks and renames; the marker lists what every rank wrote."""

    def work(ranks):
        with writing(str(tmp_path), 7, backend="fsdp", ranks=ranks) as folder:
            pathlib.Path(folder, f"rank{ranks.rank}").write_text("x" * ranks.rank)

    on_ranks(3, work)
    path = str(tmp_path / "step_00000007")
    assert list(validate(path).files) == ["rank0", "rank1", "rank2"]
    assert on_ranks(2, lambda ranks: verify(path, ranks)) == [verify(path)] * 2


def on_ranks(size, work):
    """What `work` returns on each of the ranks, which are threads here, or the error it raises."""
    barrier, values, results = threading.Barrier(size), [None] * size, [None] * size

    def run(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            return everyone

        try:
            results[rank] = work(atomic_checkpoint.RankGroup(rank, size, gather))
        except CheckpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    [t.start() for t in threads], [t.join(20) for t in threads]
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_damage_inside_a_large_file_is_the_same_error_on_every_rank(tmp_path, size):
    """The size is unchanged, so that only reading the file shows it, which one rank of all does."""
    path = save(tmp_path, 1, content=b"weights!" * 2**18)
    assert os.path.getsize(f"{path}/model/shard0") > atomic_checkpoint.SMALL_BYTES
    verify(path)
    with open(f"{path}/model/shard0", "r+b") as shard:
        shard.seek(2**20 + 12345)
        shard.write(bytes(4096))
    validate(path)  # cheap: does not look there
    errors = on_ranks(size, lambda ranks: verify(path, ranks))
    assert [type(error) for error in errors] == [DamagedCheckpoint] * size
    assert {str(e) for e in errors} == {
        f"{path}: damaged: the content of model/shard0 has changed; use another checkpoint"
    }
    older = save(tmp_path / "other", 1), save(tmp_path / "other", 2)
    assert find_checkpoint(str(tmp_path / "other"), but=[older[1]]) == older[0]


def test_a_damaged_large_file_is_not_copied_to_a_url_and_fetched_again_from_it(tmp_path):
    url = f"file://{tmp_path}/remote"
    path = save(tmp_path / "a", 1, content=b"weights!" * 2**18)
    checkpoint_remote.upload(path, url)
    with open(f"{path}/model/shard0", "r+b") as shard:
        shard.write(b"W")
    with pytest.raises(CheckpointError, match="the content of model/shard0 has changed"):
        checkpoint_remote.upload(path, url)
    assert checkpoint_remote.fetch(url, str(tmp_path / "a")) == path
    verify(path)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours catches it."""


class Operations:
    """Counts file operations and raises `Killed` at number `at` and at every later one, as for a dead process."""

    PATCHED = ("rename", "replace", "mkdir", "remove", "unlink", "rmdir", "fsync")

    def __init__(self, monkeypatch, at):
        self.count, self.at = 0, at
        for name in self.PATCHED:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self.counted(builtins.open))

    def counted(self, function):
        def call(*args, **kwargs):
            self.count += 1
            if self.count > self.at:
                raise Killed
            return function(*args, **kwargs)

        return call


def killed_at_every_operation(folder, prepare, act):
    """Yields the root of `prepare` after `act` on it was killed at its first operation, at its second, ..., and at none."""
    finished, at = False, 0
    prepare(folder / "prepared")
    while not finished:
        root = shutil.copytree(folder / "prepared", folder / str(at))
        with pytest.MonkeyPatch.context() as monkeypatch:
            Operations(monkeypatch, at)
            try:
                act(root)
                finished = True
            except Killed:
                pass
        yield root
        at += 1


def test_killed_at_every_file_operation(tmp_path):
    """Two whole checkpoints, a third save with keep=2 is killed at operation n: what is found is always whole, and
    never older than the newest before the kill. The save after that works and tidies."""

    def prepare(root):
        save(root, 1), save(root, 2)

    roots = list(killed_at_every_operation(tmp_path, prepare, lambda root: save(root, 3, keep=2)))
    assert len(roots) > 20
    for root in roots:
        assert validate(find_checkpoint(str(root))).step in (2, 3), f"killed at operation {root.name}"
        after = save(root, 4, keep=2)
        assert find_checkpoint(str(root)) == after
        assert len(names(root)) == 3 and not [n for n in names(root) if n.startswith(".")]


def test_killed_while_one_is_deleted(tmp_path):
    """Whole or not there under its name: half of it would be refused by the next start."""
    delete = lambda root: atomic_checkpoint.delete(str(root / "step_00000001"))  # noqa: E731
    roots = list(killed_at_every_operation(tmp_path, lambda root: save(root, 1), delete))
    assert len(roots) > 3 and names(roots[-1]) == ["latest"]
    for root in roots:
        assert atomic_checkpoint.damage(str(root)) == [], f"killed at operation {root.name}"


def test_killed_while_a_step_is_replaced(tmp_path):
    """The only checkpoint is saved again under the same step: no moment is without a whole one."""
    again = lambda root: save(root, 1, content=b"new!", keep=1)  # noqa: E731
    for root in killed_at_every_operation(tmp_path, lambda root: save(root, 1, content=b"old"), again):
        assert validate(find_checkpoint(str(root))).step == 1, f"killed at operation {root.name}"
    assert (root / "step_00000001/model/shard0").read_bytes() == b"new!", "not killed"


def test_a_copy_at_a_url_comes_back_equal(tmp_path):
    url = f"memory://{tmp_path.name}"
    for step in (1, 2, 3):
        checkpoint_remote.upload(save(tmp_path / "a", step), url, keep=2)
    files, base = fsspec.core.url_to_fs(url)
    assert [os.path.basename(p.rstrip("/")) for p in sorted(files.ls(base, detail=False))] == [
        "latest", "step_00000002", "step_00000003",
    ]  # fmt: skip
    fetched = checkpoint_remote.fetch(url, str(tmp_path / "b"))
    assert validate(fetched) == validate(str(tmp_path / "a/step_00000003"))
    assert find_checkpoint(str(tmp_path / "b")) == fetched
    assert checkpoint_remote.fetch(url, str(tmp_path / "b")) == fetched
    one = checkpoint_remote.fetch(f"{url}/step_00000002", str(tmp_path / "b"))
    assert validate(one).step == 2


def test_a_half_copied_checkpoint_at_a_url_is_passed_over(tmp_path, caplog):
    url = f"file://{tmp_path}/remote"
    checkpoint_remote.upload(save(tmp_path / "a", 1), url)
    checkpoint_remote.upload(save(tmp_path / "a", 2), url)
    checkpoint_remote.upload(save(tmp_path / "a", 3), url)
    os.remove(tmp_path / "remote/step_00000003" / MARKER)  # killed before its marker
    os.truncate(tmp_path / "remote/step_00000002/model/shard0", 2)
    with caplog.at_level(logging.WARNING):
        fetched = checkpoint_remote.fetch(url, str(tmp_path / "b"))
    assert validate(fetched).step == 1 and "step_00000002: damaged: model/shard0" in caplog.text


def test_an_empty_or_unknown_url(tmp_path):
    assert checkpoint_remote.fetch(f"file://{tmp_path}/empty", str(tmp_path / "b")) is None
    with pytest.raises(CheckpointError, match="checkpoint.remote: value 'nosuch://x' cannot be opened"):
        checkpoint_remote.fetch("nosuch://x", str(tmp_path / "b"))
