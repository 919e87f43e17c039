"""What is shown and kept of a URL with a signature."""

from __future__ import annotations

import pytest

from mrl.config.urls import is_signed, shown_url, without_queries, without_signatures, write_text

SIGNED = "https://host/a.jsonl?signature=one,two]three}four'five\"six"
HIDDEN = "https://host/a.jsonl?(hidden)"


def test_a_url_is_hidden_to_its_end_whatever_its_signature_holds():
    assert without_queries(SIGNED) == HIDDEN
    assert without_queries({"a": [SIGNED, {"b": SIGNED}], "c": 1}) == {"a": [HIDDEN, {"b": HIDDEN}], "c": 1}
    for plain in ("https://host/a.jsonl", "data/a?.jsonl", "hf://datasets/a/b?.jsonl", "what is 1? 2"):
        assert without_queries(plain) == plain and not is_signed(plain)
    assert shown_url("zip://a.jsonl::https://host/a.zip?key=x") == "zip://a.jsonl::https://host/a.zip"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mrl sft a.yaml data.train=https://h/a?x=1,2]3}4\"5 seed=1", "mrl sft a.yaml data.train=https://h/a?(hidden) seed=1"),
        ("mrl sft a.yaml 'data.train=https://h/a?x=1&y=2' seed=1", "mrl sft a.yaml 'data.train=https://h/a?(hidden)' seed=1"),
        ("train: https://h/a?x=1\neval: https://h/b?x=2\n", "train: https://h/a?(hidden)\neval: https://h/b?(hidden)\n"),
    ],
)  # fmt: skip
def test_a_url_in_a_text_ends_at_a_blank(text, shown):
    assert without_queries(text) == shown


def test_signatures_are_of_paths_and_of_values_that_are_urls():
    question = "See https://host/docs?page=2"
    sources = [{"path": SIGNED, "system": question}, SIGNED]
    assert without_signatures({"data": {"train": sources, "eval": {"a": {"path": SIGNED}}, "system": question}}) == {
        "data": {"train": [{"path": HIDDEN, "system": question}, HIDDEN], "eval": {"a": {"path": HIDDEN}}, "system": question}
    }  # fmt: skip
    assert without_signatures({"data": {"train": SIGNED, "eval": None}}) == {"data": {"train": HIDDEN, "eval": None}}
    assert without_signatures({"url": question}) == {"url": question}
    zipped = {"data": {"train": "zip://a.jsonl::https://h/a.zip?k=one"}}
    assert without_signatures(zipped) == {"data": {"train": "zip://a.jsonl::https://h/a.zip?(hidden)"}}
    server = "https://judge/v1?key=secret"
    assert without_signatures({"teacher": {"server": {"url": server}}, "urls": [server]}) == {
        "teacher": {"server": {"url": "https://judge/v1?(hidden)"}}, "urls": ["https://judge/v1?(hidden)"],
    }  # fmt: skip


def test_a_file_with_a_signature_is_its_owners_alone_from_its_first_byte(tmp_path):
    """A file that a killed run has left was open to all: whoever has opened it reads nothing of the new one."""
    path = tmp_path / "config.yaml.tmp"
    path.touch(mode=0o644)
    with path.open() as opened:
        write_text(path, f"train: {SIGNED}\n")
        assert opened.read() == "" and path.read_text() == f"train: {SIGNED}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    write_text(path, "train: a.jsonl\n")
    assert path.stat().st_mode & 0o044
