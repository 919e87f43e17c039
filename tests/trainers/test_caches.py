"""Log-probs of a reference or of teachers that are kept beside a run: what a row is known by, and passes that end early."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mrl.batch import make_batch
from mrl.errors import ConfigError
from mrl.trainers.caches import weights_digest
from mrl.trainers.reference import AnswerCache
from mrl.trainers.teacher_cache import TopCache, TopTokens
from tests.engine.harness import Case, run_case, run_world
from tests.tiers import slow_but
from tests.trainers import test_distill, test_dpo, tiny_runs

of_teachers, of_references = test_distill.places, test_dpo.places


def test_a_cache_knows_a_row_by_its_tokens_and_what_trains_of_them(tmp_path):
    """Whatever the order that rows are asked for in; what was made by another teacher is not read."""
    masks = [[0, 0, 1], [0, 1, 1], [0, 1, 0.5]]  # of the same tokens; a weight changes nothing
    batch = make_batch([[1, 2, 3]] * 3, masks)
    said = TopTokens(torch.arange(5)[:, None].int(), -torch.arange(5.0)[:, None])
    cache = TopCache(tmp_path, {"temperature": 1.0})
    cache.add(batch, said)
    cache.write()
    cache.read()
    assert cache.count == 2 and not list(cache.lacks([batch]))
    assert cache.of(batch.select([2, 0])).ids[:, 0].tolist() == [1, 2, 0]
    other = TopCache(tmp_path, {"temperature": 2.0})
    other.read()
    assert other.count == 0 and len(list(other.lacks([batch]))) == 1
    other.add(batch, said)
    other.write()
    assert [path.name for path in tmp_path.iterdir()] == ["log_probs-00001.pt"]  # in place of the first's


def test_files_are_whole_or_not_there_and_small(tmp_path, monkeypatch):
    """A torn one is one that is not there; the rows of all others are read, and each row is in one of them."""
    batches = [make_batch([[i, 1, 2], [9, 8, 7]], [[0, 1, 1]] * 2) for i in range(4)]
    said = [TopTokens(torch.full((4, 2), i).int(), torch.full((4, 2), -float(i))) for i in range(4)]
    # both rows of the first, then two batches' new ones
    monkeypatch.setattr(TopCache, "max_bytes", 2 * said[0].ids.nbytes)
    cache = TopCache(tmp_path, {})
    counts = [cache.add(batch, of) for batch, of in zip(batches, said, strict=True)]
    files = sorted(tmp_path.iterdir())
    assert counts == [2, 3, 4, 5] and [path.name for path in files] == ["log_probs-00000.pt", "log_probs-00001.pt"]
    cache.write()  # the last row
    (tmp_path / "log_probs-00003.partial").write_bytes(b"")
    cache.read()
    assert cache.count == 5 and [int(cache.of(batch).ids[0, 0]) for batch in batches] == [0, 1, 2, 3]
    assert all(cache.of(batch).ids[-1, 0] == 0 for batch in batches)  # as it was said first
    files[1].write_bytes(files[1].read_bytes()[:-200])
    torn = TopCache(tmp_path, {})
    torn.read()
    assert [batch is batches[1] or batch is batches[2] for batch in torn.lacks(batches)] == [True, True]


@pytest.mark.parametrize("kind", [TopCache, AnswerCache])
def test_a_bit_that_changed_is_no_other_number(tmp_path, caplog, kind):
    """The file is made anew, with a line."""
    batches = [make_batch([[i, 1, 2]], [[0, 1, 1]]) for i in range(2)]

    def cache():
        return TopCache(tmp_path, {}) if kind is TopCache else AnswerCache(tmp_path / "log_probs.pt", {})

    first, number = cache(), torch.tensor([-1.5], dtype=torch.float64)
    for batch in batches:
        first.add(batch, TopTokens(torch.zeros(2, 1).int(), -torch.ones(2, 1)) if kind is TopCache else number)
        first.write()
    files = sorted(tmp_path.glob("*.pt"))
    whole = files[0].read_bytes()
    lacking = []
    for at in range(0, len(whole), 7):
        content = bytearray(whole)
        content[at] ^= 1
        files[0].write_bytes(content)
        again = cache()
        again.read()
        lacking.append(len(list(again.lacks(batches))))
    assert set(lacking) <= {0, 1 if kind is TopCache else 2}
    assert lacking.count(0) < len(lacking) / 2, "padding between records says nothing"
    assert f"{files[0]}: cannot be read (" in caplog.text and "is made anew" in caplog.text


def test_a_disk_that_is_full_is_one_line(tmp_path):
    for place in ("teacher", "reference"):
        (tmp_path / place).mkdir()
    (tmp_path / "teacher" / "log_probs-00000.partial").symlink_to("/dev/full")
    (tmp_path / "reference" / "log_probs.partial").symlink_to("/dev/full")
    batch = make_batch([[0, 1, 2]], [[0, 1, 1]])
    top, answers = TopCache(tmp_path / "teacher", {}), AnswerCache(tmp_path / "reference" / "log_probs.pt", {})
    top.add(batch, TopTokens(torch.zeros(2, 1).int(), -torch.ones(2, 1)))
    answers.add(batch, torch.tensor([-1.5], dtype=torch.float64))
    for cache in (top, answers):
        with pytest.raises(ConfigError, match="output_dir: value .* cannot be written .*No space left"):
            cache.write()


def test_weights_are_known_by_their_bytes(tmp_path):
    """Read once, and again where a file is another by its time; elsewhere and at another time they are the same."""
    folder, memo = tmp_path / "model", tmp_path / "run" / "weights.json"
    folder.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.arange(5.0)}, folder / f"{name}.safetensors")
    first = weights_digest(str(folder), memo)
    kept = json.loads(memo.read_text())
    memo.write_text(json.dumps(kept | {"sha256": "as it was found"}))
    assert weights_digest(str(folder), memo) == "as it was found"
    assert weights_digest(str(folder.rename(tmp_path / "moved")), memo) == first
    os.utime(tmp_path / "moved" / "a.safetensors", (1, 1))  # downloaded again
    assert weights_digest(str(tmp_path / "moved"), memo) == first
    save_file({"b": torch.arange(1.0, 6.0)}, tmp_path / "moved" / "b.safetensors")
    assert weights_digest(str(tmp_path / "moved"), memo) != first


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
@pytest.mark.parametrize("command, world", slow_but([("sft", 1)], [("sft", 1), ("dpo", 2)]))
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
    folder = tmp_path / "run" / ("teacher" if command == "sft" else "reference/log_probs.pt")
    where = f"while the {doing} were computed, saved in {folder}"
    assert ended[:2] == ("stopped", f"stopped by SIGTERM {where}; run the same command again to go on") and batches == 2
    assert 0 < len(kept) < len(every)
    case = Case("tests.trainers.passes:train", {"config": run, "command": command, "dies_in_file": 2})
    error = run_world(world, [case])[0].error
    assert error is not None and "exit code -9" in error, error
    later = known(tmp_path / "run")
    assert len(kept) < len(later) < len(every) and list(folder.parent.rglob("*.partial"))
    ended, batches = asked(run)
    assert ended[:2] == ("done", "") and 0 < batches < 3
    assert f": goes on from its log-probs of {len(later)} " in ended[2]
    assert known(tmp_path / "run") == every
    assert tiny_runs.steps(tmp_path / "run") == tiny_runs.steps(tmp_path / "whole")
