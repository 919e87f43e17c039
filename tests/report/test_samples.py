"""Which saved rollouts a page has, and their tokens as text."""

from __future__ import annotations

import gzip
import json

import pytest

from mrl.report import samples
from mrl.report.samples import SampleReader, TokenTexts, first_groups, sample_files
from mrl.rollout.samples import write_samples
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.report import made_runs
from tests.report.made_runs import sample
from tests.rollout.environments import Says, make_prompts, make_rollouts


@pytest.fixture
def run(tmp_path):
    return made_runs.make_rl(tmp_path / "run")


def texts_of(files):
    return {(f["series"], f["step"]): [(s["index"], s["sample"]) for s in f["samples"]] for f in files}


def test_samples_that_the_trainer_wrote(tmp_path):
    """By the writer of `mrl ppo` itself: prompt, answer, rewards, and what each token of the answer adds."""
    tokenizer = make_tokenizer(CHATML)
    run = made_runs.make_run(tmp_path / "run", [(1, {"reward/mean": 1.0})])
    tokenizer.save_pretrained(run / "hf")
    prompts = make_prompts([{"prompt": [{"role": "user", "content": "hello \u2028é"}]}, {"prompt": "fox"}], tokenizer)
    says = Says(tokenizer, "lazy é dog \U0001f600!", "quick")
    trajectories = make_rollouts(says).sample(prompts, step=1, samples=2)
    parts = {"good": [1.0, 0.0, 1.0, 0.5]}
    write_samples(
        str(run / "samples"), 1, trajectories, rewards=[2.0, 0.0, 2.0, 1.0], parts=parts, advantages=[1.0, -1.0, 0.5, -0.5],
        compress=True,
    )  # fmt: skip
    found = SampleReader(run).read(100)
    [file] = found.files
    assert (file["series"], file["step"], file["of"]) == ("step", 1, 4)
    for shown, t, good in zip(file["samples"], trajectories, parts["good"], strict=True):
        start = t.mask.index(1)
        assert shown["ids"] == t.tokens[start:] and shown["mask"] == t.mask[start:]
        assert shown["log_probs"] == pytest.approx(t.log_probs[start:], rel=1e-3)
        assert "".join(shown["texts"]) == tokenizer.decode(t.tokens[start:]) and t.text in "".join(shown["texts"])
        assert shown["completion"] == t.text and shown["rewards"] == {"good": good} and shown["row"] == t.prompt.where
    assert file["samples"][0]["prompt"] == [{"role": "user", "content": "hello \u2028é"}]
    assert [shown["advantage"] for shown in file["samples"]] == [1.0, -1.0, 0.5, -0.5]
    assert found.notes == [
        "step: 4 samples of 1 of 1 files; the first 100 of each at most, and whole groups where they fit",
        "--samples N puts up to N of a run on the page; here it was 100",
    ]


def test_tokens_are_texts_that_join_to_the_whole(tmp_path):
    """Characters of several tokens are at the last of them, also behind many tokens and at the end."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "hf")
    texts = TokenTexts(tmp_path)
    for words in ("the quick fox", "é" * 40 + "\U0001f600 ok \U0001f468\u200d\U0001f469", "\u05e9\u05dc\u05d5\u05dd"):
        ids = tokenizer(words)["input_ids"]
        pieces = texts.of(ids)
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    half = tokenizer("\U0001f600")["input_ids"][:2]
    assert "".join(texts.of([*ids, *half])) == tokenizer.decode([*ids, *half])
    assert texts.problem is None


def test_without_a_tokenizer_tokens_are_ids(run, tmp_path):
    found = SampleReader(run).read(100)
    assert found.files[0]["samples"][0]["ids"] == [7, 8, 9] and "texts" not in found.files[0]["samples"][0]
    assert f"tokens are shown as ids: there is no tokenizer.json in {run}/hf and nowhere/model" in found.notes
    (run / "hf").mkdir()
    (run / "hf" / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in " ".join(SampleReader(run).read(100).notes)


def test_no_more_samples_than_asked_for(run):
    for most in (1, 2, 5, 8, 13, 30, 1000):
        found = SampleReader(run).read(most)
        count = sum(len(file["samples"]) for file in found.files)
        assert 0 < count <= max(most, 2), "one of each series at least"
        assert f"here it was {most}" in found.notes[-1]
    assert texts_of(SampleReader(run).read(26).files) == {
        **{("step", step): [(0, n) for n in range(4)] for step in (1, 3, 5)},
        ("eval", 0): [(i, 0) for i in range(5)],
    }, "whole groups"
    assert SampleReader(run).read(0).files == [] and "left out the 4 files" in SampleReader(run).read(0).notes[0]


def test_groups_are_whole_where_they_fit():
    rows = [sample(i, n) for n in range(3) for i in (7, 8)]  # a group need not stand together

    def found(most):
        return [(row["index"], row["sample"]) for row in first_groups(rows, most)]

    assert found(6) == [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (8, 2)]
    assert found(5) == found(3) == [(7, 0), (7, 1), (7, 2)] and found(2) == [(7, 0), (7, 1)]


def test_names_of_files(run):
    made_runs.write_samples(run, "step_00000001.jsonl.gz.tmp", [])
    made_runs.write_samples(run, "notes.jsonl", [])
    made_runs.write_samples(run, "baseline_00000001.jsonl", [sample(0, 0)])
    with gzip.open(run / "samples" / "step_100000000.jsonl.gz", "wt") as file:
        file.write(json.dumps(sample(0, 0)) + "\n")
    with gzip.open(run / "samples" / "step_00000001.jsonl.gz", "wt") as file:
        file.write("")
    names = [file.path.name for file in sample_files(run / "samples")]
    assert names == [
        "step_00000001.jsonl", "step_00000003.jsonl", "step_00000005.jsonl", "step_100000000.jsonl.gz",
        "eval_00000000.jsonl", "baseline_00000001.jsonl",
    ]  # fmt: skip


def test_what_is_no_sample_is_said(run):
    path = made_runs.write_samples(run, "step_00000009.jsonl", [sample(0, 0), 3, {}, sample(0, 1, rewards=None)])
    with path.open("a") as file:
        file.write('{"half": ')
    whole = run / "samples" / "step_00000011.jsonl.gz"
    whole.write_bytes(gzip.compress(json.dumps(sample(0, 0)).encode() * 500)[:-20])
    found = SampleReader(run).read(100)
    by_step = {file["step"]: file for file in found.files if file["series"] == "step"}
    assert [sorted(s)[:2] for s in by_step[9]["samples"]] == [["advantage", "completion"]] * 2 + [[]]
    notes = "\n".join(found.notes)
    assert "step_00000009.jsonl: lines that are no sample, and left out: 2" in notes
    assert "step_00000011.jsonl.gz: cannot be read beyond 0 samples (" in notes


def test_samples_without_tokens(run):
    rows = [{k: v for k, v in sample(0, n).items() if k not in ("tokens", "mask", "log_probs")} for n in range(2)]
    made_runs.write_samples(run, "step_00000003.jsonl", rows)
    found = SampleReader(run).read(100)
    assert [s["completion"] for f in found.files if f["step"] == 3 for s in f["samples"]] == ["answer 0", "answer 1"]


def test_long_samples_are_fewer_and_shorter(run, monkeypatch):
    monkeypatch.setattr(samples, "TOKENS_OF_PAGE", 400)
    long = {"tokens": [1] + [7] * 9000, "mask": [0] + [1] * 9000, "log_probs": [0.0] + [-0.5] * 9000}
    made_runs.write_samples(
        run, "step_00000005.jsonl", [sample(i, 0, **long, completion="x" * 50_000) for i in range(9)]
    )
    found = SampleReader(run).read(100)
    [shown] = [s for f in found.files if f["series"] == "step" for s in f["samples"]]
    assert len(shown["ids"]) == len(shown["log_probs"]) == 4000 and shown["tokens_left_out"] == 5000
    assert len(shown["completion"]) < 21_000 and "[... 30,000 characters left out ...]" in shown["completion"]


def test_advantages_of_tokens(run):
    made_runs.write_samples(
        run, "step_00000005.jsonl", [sample(0, 0, advantages=[0.0, 0.0, 0.123456, -1, float("nan")])]
    )
    [shown] = next(f for f in SampleReader(run).read(100).files if f["step"] == 5)["samples"]
    assert shown["advantages"] == [0.1235, -1.0, None] and shown["log_probs"] == [-0.1, -2.0, -7.123]
