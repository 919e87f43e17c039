"""What is said of files elsewhere; how they are read is in test_streamed.py."""

from __future__ import annotations

import pytest

from mrl.data import remote
from mrl.errors import DataError


@pytest.mark.parametrize(
    "text",
    [
        "403 Client Error: Forbidden for url: https://cdn/a.jsonl?Signature=secret,secret (Request ID: 1)",
        "Max retries exceeded with url: /a.jsonl?Signature=secret&Key=secret (Caused by Request ID: 1)",
        "404, message='Not Found', url='https://host/a.jsonl?secret' Request ID: 1",
    ],
)
def test_what_libraries_say_is_shown_without_signatures(text):
    said = str(remote.read_failure("data.train", "hf://datasets/a/b/a.jsonl", OSError(text)))
    assert "secret" not in said and "a.jsonl?(hidden)" in said and "Request ID: 1" in said


def test_a_signature_that_is_refused_is_not_shown(monkeypatch):
    """Python quotes the address without its host."""
    monkeypatch.setattr(remote, "WAITS_TO_FIND_S", ())
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(InvalidURL: ") as refused:
        remote.find_files("http://127.0.0.1:9/a.jsonl?se\x01cret", split=None, key="data.train")
    assert "cret" not in str(refused.value)
