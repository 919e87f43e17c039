"""`mrl generate --chat` on a real terminal: a pty, whose other end types and reads as a user does."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 240
NEW_TOKENS = 24


class Terminal:
    """`mrl generate MODEL --chat ARGUMENTS`, started on a terminal of its own."""

    def __init__(self, model: object, *arguments: object) -> None:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "mrl", "generate", model, "--chat", "--max-new-tokens", NEW_TOKENS, *arguments]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environ |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            start_new_session=True,
        )
        os.close(theirs)
        self.fd, self.seen, self.reads = ours, "", []

    def read(self) -> bool:
        """Takes what has come; False at the end."""
        if not select.select([self.fd], [], [], 1.0)[0]:
            return True
        try:
            piece = os.read(self.fd, 4096)
        except OSError:  # Linux says so when the other end is closed
            return False
        self.reads.append(piece)
        self.seen = b"".join(self.reads).decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(piece)

    def wait_for(self, words: str, after: int = 0) -> str:
        """Reads until the words have come; returns what stands before them, from `after` on."""
        deadline = time.monotonic() + TIMEOUT_S
        while words not in self.seen[after:]:
            assert self.read() and time.monotonic() < deadline, f"no {words!r} in {self.seen[after:]!r}"
        return self.seen[after : self.seen.index(words, after)]

    def type(self, text: str) -> int:
        """Returns how much had been seen before."""
        before = len(self.seen)
        os.write(self.fd, text.encode())
        return before

    def ask(self, text: str) -> str:
        """What stands between a line that was typed and the next prompt."""
        before = self.type(text + "\n")
        answer = self.wait_for("\n> ", before)
        return answer.partition("\n")[2]

    def end(self) -> int:
        while self.read():
            pass
        os.close(self.fd)
        return self.process.wait(timeout=TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def terminal():
    started = []

    def start(*arguments: object) -> Terminal:
        started.append(Terminal(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def answer_of_transformers(folder: str, messages: list[dict[str, str]]) -> str:
    tokenizer, hf = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    made = hf.generate(
        torch.tensor([ids]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)


def shown(text: str) -> str:
    """As a terminal has it: without bytes that change nothing that is compared here."""
    return re.sub(r"[\r\n]+", "\n", text).strip("\n")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), marks=pytest.mark.nightly),
        pytest.param(("engine.parallel.tp=2", "--nproc", "2"), marks=pytest.mark.nightly),
        pytest.param(("engine.backend=fsdp", "--nproc", "2"), marks=pytest.mark.nightly),
    ],
)
def test_a_conversation(folder, terminal, tmp_path, layout):
    """Turns with what was said before them, other system text, a saved file, an end; as transformers answers greedily."""
    model = folder("qwen3", seed=2)
    chat = terminal(model, "--greedy", "--system", "Be brief.", *layout)
    chat.wait_for("> ")
    head = [{"role": "system", "content": "Be brief."}]
    first = answer_of_transformers(model, [*head, user("hello")])
    assert shown(chat.ask("hello")) == shown(first)
    second = answer_of_transformers(
        model, [*head, user("hello"), {"role": "assistant", "content": first}, user("2 + 2?")]
    )
    pieces = len(chat.reads)
    assert shown(chat.ask("2 + 2?")) == shown(second)
    assert len(chat.reads) - pieces > 3, "the answer came at once, and not token by token"
    assert f"({tmp_path / 'talk.jsonl'}: 5 messages, as one more row)" in chat.ask(f"/save {tmp_path / 'talk.jsonl'}")
    (row,) = map(json.loads, (tmp_path / "talk.jsonl").read_text().splitlines())
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in row["messages"]] == ["Be brief.", "hello", first, "2 + 2?", second]
    assert "(the conversation is empty)" in chat.ask("/reset")
    assert shown(chat.ask("hello")) == shown(first), "what was said before is forgotten, the system text is not"
    assert "begins anew with this system message" in chat.ask("/system Go on.")
    other = answer_of_transformers(model, [{"role": "system", "content": "Go on."}, user("hello")])
    assert shown(chat.ask("hello")) == shown(other) != shown(first)
    assert "/nothing is no command" in chat.ask("/nothing")
    assert "the prompt has" in chat.ask("hello " * 120) and "128 positions" in chat.seen
    two_lines = answer_of_transformers(model, [{"role": "system", "content": "Go on."}, user("a\nb")])
    chat.ask("/reset")
    before = chat.type("a\\\nb\n")
    assert shown(chat.wait_for("\n> ", before).split("\n", 2)[2]) == shown(two_lines)
    chat.type("/quit\n")
    assert chat.end() == 0


@pytest.mark.nightly
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(folder, terminal):
    """A model that would go on for thousands of tokens; the conversation keeps what it said."""
    model = folder("qwen3", max_position_embeddings=20_000, seed=4)
    chat = terminal(model, "--temperature", "1", "--max-new-tokens", 15_000)
    chat.wait_for("> ")
    before = chat.type("hello\n")
    while len(chat.seen) < before + 200:
        assert chat.read(), chat.seen
        if "\n> " in chat.seen[before:]:  # the end token was drawn first
            before = chat.type("hello\n")
    os.killpg(chat.process.pid, signal.SIGINT)
    chat.wait_for("\n> ", before)
    assert chat.process.poll() is None
    chat.type("\x04")
    assert chat.end() == 0
