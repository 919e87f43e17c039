"""What the first rank to end leaves for the job's script, and with which exit code it leaves."""

from __future__ import annotations

import pytest

from mrl import cli
from mrl.errors import DataError, Stopped
from mrl.launch.slurm.ending import MAX_LENGTH, VARIABLE, record
from mrl.launch.slurm.follow import first_error
from tests.bad_input.mistakes import Workspace
from tests.slurm.slurm_site import CliRunner


def test_the_first_one_stays(tmp_path):
    path = tmp_path / "first_end"
    assert record({VARIABLE: str(path), "RANK": "3"}, 2, "rows.jsonl:3:\n is wrong", "all of it")
    assert record({VARIABLE: str(path), "RANK": "1"}, 1, "connection closed")
    assert path.read_text() == "2\nrank 3: rows.jsonl:3: is wrong\nall of it"
    assert [one.name for one in tmp_path.iterdir()] == ["first_end"]


def test_without_a_script_that_asks_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not record({"RANK": "0"}, 2, "x")
    assert not record({VARIABLE: ""}, 2, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_message_is_one_line_that_a_history_has_room_for(tmp_path):
    path = tmp_path / "first_end"
    record({VARIABLE: str(path)}, 1, "x\n" * 10_000)
    code, reason, rest = path.read_text().split("\n")
    assert (code, len(reason), rest) == ("1", MAX_LENGTH + len("rank 0: "), "")


def test_a_folder_that_is_gone_does_not_hide_the_error(tmp_path):
    assert record({VARIABLE: str(tmp_path / "gone" / "first_end")}, 2, "x")


def test_the_first_error_is_of_the_newest_start(tmp_path):
    """An error that a later start has got over is no news."""
    for start, error in ((8, "2\nrank 0: old\n"), (9, "1\nrank 3: lost\n"), (10, None)):
        folder = tmp_path / f"7.{start}"
        folder.mkdir()
        (folder / "began_at").write_text("none\n")
        if error is not None:
            (folder / "first_end").write_text(error)
    assert first_error(tmp_path, "7") is None
    (tmp_path / "7.10" / "first_end").write_text("3\nrank 1: new\n")
    assert first_error(tmp_path, "7") == "first error (start 10, exit code 3), rank 1: new\n\n"
    assert first_error(tmp_path, "8") is None


@pytest.mark.parametrize(
    ("error", "asked", "code", "left"),
    [
        (Stopped("saved"), True, 0, "75\nrank 1: saved\n"),
        (Stopped("saved"), False, 75, None),
        (DataError("bad"), True, 2, "2\nrank 1: bad\n"),
    ],
)
def test_a_rank_that_has_said_that_it_stopped_leaves_with_0(tmp_path, monkeypatch, error, asked, code, left):
    """With 75 srun would kill the ranks that are still leaving, and torchrun would print an error."""
    Workspace(tmp_path).make()
    monkeypatch.chdir(tmp_path)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    place |= {VARIABLE: str(tmp_path / "first_end")} if asked else {}
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in (place | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)

    def fail(config, command_line):
        raise error

    monkeypatch.setattr("mrl.launch.start.trainer_of", lambda command: fail)
    done = CliRunner().invoke(cli.main, ["sft", "config.yaml"])
    assert done.exit_code == code, done.output
    path = tmp_path / "first_end"
    assert (path.read_text() if path.exists() else None) == left
