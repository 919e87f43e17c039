"""Log-probs of a reference or of teachers that are kept beside a run: what a row is known by, and passes that end early."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from mrl.batch import make_batch
from mrl.config.schema import EngineConfig
from mrl.errors import ConfigError
from mrl.trainers.caches import RowCache, with_precision
from tests.engine.harness import Case, run_case, run_world
from tests.tiers import nightly_but
from tests.trainers import test_distill, test_dpo, tiny_runs

of_teachers, of_references = test_distill.places, test_dpo.places


def of_tokens(folder, made_by=None):
    return RowCache(folder, made_by or {}, ("ids", "log_probs"), per_token=True)


def names(folder):
    return sorted(path.name for path in folder.glob("log_probs*.pt"))


def of_rows(folder, made_by=None):
    return RowCache(folder, made_by or {}, ("log_probs",), per_token=False)


def said(numbers):
    return {"ids": torch.tensor(numbers)[:, None].int(), "log_probs": -torch.tensor(numbers)[:, None].float()}


def test_a_cache_knows_a_row_by_its_tokens_and_what_trains_of_them(tmp_path):
    """Whatever the order that rows are asked for in; what was made by another teacher is not read."""
    masks = [[0, 0, 1], [0, 1, 1], [0, 1, 0.5]]  # of the same tokens; a weight changes nothing
    batch = make_batch([[1, 2, 3]] * 3, masks)
    cache = of_tokens(tmp_path, {"temperature": 1.0})
    cache.add(batch, said(list(range(5))))
    cache.write()
    cache.read(names(tmp_path))
    assert cache.count == 2 and not list(cache.lacks([batch]))
    assert cache.of(batch.select([2, 0]))["ids"][:, 0].tolist() == [1, 2, 0]
    other = of_tokens(tmp_path, {"temperature": 2.0})
    other.read(names(tmp_path))
    assert other.count == 0 and len(list(other.lacks([batch]))) == 1
    other.add(batch, said(list(range(5))))
    other.write()
    assert [path.name for path in tmp_path.iterdir()] == ["log_probs-00001.pt"]  # in place of the first's


def test_files_are_whole_or_not_there_and_small(tmp_path, monkeypatch):
    """A torn one is one that is not there; the rows of all others are read, and each row is in one of them."""
    batches = [make_batch([[i, 1, 2], [9, 8, 7]], [[0, 1, 1]] * 2) for i in range(4)]
    monkeypatch.setattr(RowCache, "max_bytes", 32)  # both rows of the first, then two batches' new ones
    cache = of_tokens(tmp_path)
    for i, batch in enumerate(batches):
        cache.add(batch, said([i] * 4))
    files = sorted(tmp_path.iterdir())
    assert cache.count == 5 and [path.name for path in files] == ["log_probs-00000.pt", "log_probs-00001.pt"]
    cache.write()  # the last row
    (tmp_path / "log_probs-00003.partial").write_bytes(b"")
    cache.read(names(tmp_path))
    assert cache.count == 5 and [int(cache.of(batch)["ids"][0, 0]) for batch in batches] == [0, 1, 2, 3]
    assert all(cache.of(batch)["ids"][-1, 0] == 0 for batch in batches)  # as it was said first
    files[1].write_bytes(files[1].read_bytes()[:-200])
    torn = of_tokens(tmp_path)
    torn.read(names(tmp_path))
    assert [batch is batches[1] or batch is batches[2] for batch in torn.lacks(batches)] == [True, True]


def test_what_a_cache_knows_stays_where_rows_are_added(tmp_path):
    """To the bit, as a resumed run is; the choice of fp8, which an engine may change, is one of what it is known by."""
    first, both = (make_batch([[1, 2], [1, 3]][:count], [[0, 1]] * count) for count in (1, 2))
    cache = of_rows(tmp_path)
    cache.add(first, {"log_probs": torch.tensor([-1.0], dtype=torch.float64)})
    cache.add(both, {"log_probs": torch.tensor([-1.5, -2.0], dtype=torch.float64)})
    cache.write()
    cache.read(names(tmp_path))
    assert cache.of(both)["log_probs"].tolist() == [-1.0, -2.0]
    other = of_rows(tmp_path, with_precision(EngineConfig(megatron={"fp8": "e4m3"})))
    other.read(names(tmp_path))
    assert other.count == 0 and with_precision(EngineConfig(megatron={"overlap_grad_reduce": True})) == {}


def test_a_bit_that_changed_is_no_other_number(tmp_path, caplog):
    """The file is made anew, with a line."""
    batch = make_batch([[0, 1, 2]], [[0, 1, 1]])
    first = of_tokens(tmp_path)
    first.add(batch, said([0, 0]))
    first.write()
    [file] = tmp_path.glob("*.pt")
    whole = file.read_bytes()
    lacking = []
    for at in range(0, len(whole), 23):
        content = bytearray(whole)
        content[at] ^= 1
        file.write_bytes(content)
        again = of_tokens(tmp_path)
        again.read(names(tmp_path))
        lacking.append(len(list(again.lacks([batch]))))
    assert set(lacking) <= {0, 1}
    assert lacking.count(0) < len(lacking) / 2, "padding between records says nothing"
    assert f"{file}: cannot be read (" in caplog.text and "is made anew" in caplog.text


def test_a_disk_that_is_full_is_one_line(tmp_path):
    (tmp_path / "log_probs-00000.partial").symlink_to("/dev/full")
    cache = of_rows(tmp_path)
    cache.add(make_batch([[0, 1, 2]], [[0, 1, 1]]), {"log_probs": torch.tensor([-1.5], dtype=torch.float64)})
    with pytest.raises(ConfigError, match="output_dir: value .* cannot be written .*No space left"):
        cache.write()


@pytest.mark.parametrize("hidden, says", [("at first", ""), ("old", ""), ("all", "cannot be read on every rank")])
def test_ranks_ask_together_where_one_does_not_see_a_file(tmp_path, hidden, says):
    """A node may see it later than another one, or never."""
    details = {"folder": str(tmp_path), "hidden": hidden}
    asked, error = run_case(2, "tests.trainers.passes:fill_where_a_file_is_not_seen", **details)
    assert asked == 2 and says in error and bool(says) == bool(error)


# ---------------------------------------------------------------------------------------------------- a pass that ends


def known(output_dir: pathlib.Path) -> dict[bytes, list[float]]:
    """Row -> the bits of what is kept of it, of a run of `mrl sft` or `mrl dpo`."""
    found: dict[bytes, list[float]] = {}
    for path in (output_dir / "teacher").glob("*.pt"):
        content = torch.load(path, weights_only=True)
        counts = content["counts"].tolist()
        each = zip(
            content["names"].numpy(), content["ids"].split(counts), content["log_probs"].split(counts), strict=True
        )
        found |= {name.tobytes(): [ids.tolist(), log_probs.tolist()] for name, ids, log_probs in each}
    for path in (output_dir / "reference").glob("*.pt"):
        content = torch.load(path, weights_only=True)
        found |= {n.tobytes(): v for n, v in zip(content["names"].numpy(), content["log_probs"].tolist(), strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command, world", nightly_but([("sft", 1)], [("sft", 1), ("dpo", 2)]))
def test_a_pass_that_is_stopped_and_killed_goes_on_to_the_bit(request, tmp_path, command, world):
    """A signal to the last rank before the third batch, then SIGKILL in the middle of a file: nothing that was written is
    asked for again."""
    places = request.getfixturevalue("of_teachers" if command == "sft" else "of_references")
    of, doing = (test_distill, "log-probs of teacher") if command == "sft" else (test_dpo, "reference's log-probs")
    keys: dict[str, Any] = {"teacher" if command == "sft" else "reference": {"cache": True}, "train": {"steps": 2}}
    data = {"data": {"eval": str(places / "eval.jsonl")}}
    whole, run = (of.make_config(places, tmp_path / name, **keys, **data) for name in ("whole", "run"))

    def asked(config: dict[str, Any], **happening: Any) -> tuple[tuple[str, str, str], int]:
        """How the run ended, what it printed, and how many batches its pass has asked the frozen model for."""
        details = {"config": config, "command": command, **happening}
        return run_case(world, "tests.trainers.passes:train", **details)

    assert asked(whole)[0][:2] == ("done", "")
    every = known(tmp_path / "whole")
    ended, batches = asked(run, stops_before=3)
    kept = known(tmp_path / "run")
    folder = tmp_path / "run" / ("teacher" if command == "sft" else "reference")
    where = f"while the {doing} were computed, saved in {folder}"
    assert ended[:2] == ("stopped", f"stopped by SIGTERM {where}; run the same command again to go on") and batches == 2
    assert 0 < len(kept) < len(every)
    case = Case("tests.trainers.passes:train", {"config": run, "command": command, "dies_in_file": 2})
    error = run_world(world, [case])[0].error
    assert error is not None and "exit code -9" in error, error
    later = known(tmp_path / "run")
    assert len(kept) < len(later) < len(every) and list(folder.glob("*.partial"))
    ended, batches = asked(run)
    assert ended[:2] == ("done", "") and 0 < batches < 3
    assert f": goes on from its log-probs of {len(later)} rows in " in ended[2]
    assert known(tmp_path / "run") == every
    assert tiny_runs.steps(tmp_path / "run") == tiny_runs.steps(tmp_path / "whole")
