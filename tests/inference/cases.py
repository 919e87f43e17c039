"""What runs in worlds (tests/engine/harness.py): the command line of `mrl`, on every rank, as torchrun starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import torch
from click.testing import CliRunner

from mrl import cli
from mrl.engine.collective import all_ranks
from mrl.engine.kept import KeptSequences
from mrl.inference import chat
from mrl.launch import inference
from tests.engine.harness import run_case
from tests.rollout import stand_in_vllm

REPO = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended on rank 0."""

    code: int
    out: str
    err: str


def mrl(*arguments: object, world: int = 1, cwd: object = "/", stdin: str = "") -> Done:
    """`mrl ARGUMENTS` on so many ranks, of which the first has a stdin. A command that fails with a traceback fails the
    test."""
    return run_case(
        world, "tests.inference.cases:command", arguments=[str(a) for a in arguments], cwd=str(cwd), stdin=stdin
    )


def command(arguments: list[str], cwd: str, stdin: str) -> Done:
    os.chdir(cwd)
    is_main = os.environ.get("RANK", "0") == "0"
    done = CliRunner().invoke(cli.main, arguments, input=stdin if is_main else "")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def greedy(model: Any, ids: list[int], count: int, end: int) -> list[int]:
    """The new tokens of a transformers model, which `end` ends, after a prompt."""
    made = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=end, pad_token_id=0)
    return made[0, len(ids) :].tolist()


def in_a_shell(line: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """A line as a user types it, in processes of its own."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    environ |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    programs = {"mrl": "mrl", "torchrun": "torch.distributed.run"}
    script = "".join(f'{name}() {{ "{sys.executable}" -m {module} "$@"; }}\n' for name, module in programs.items())
    return subprocess.run(
        ["bash", "-c", script + line], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )


def on_all_ranks(arguments: list[str], folders: list[str]) -> list[Done]:
    """How `mrl ARGUMENTS` ended on each rank, each in a folder of its own."""
    done = command(arguments, folders[int(os.environ["RANK"])], "")
    return all_ranks().gather(done)


def refusal(*arguments: object, cwd: object, stdin: str | bytes = "") -> str:
    """The last line of `mrl ARGUMENTS`, which is refused before any rank is started. It runs in this process."""
    with contextlib.chdir(str(cwd)), mock.patch.object(inference, "run", side_effect=AssertionError("ranks began")):
        done = CliRunner().invoke(cli.main, [str(a) for a in arguments], input=stdin)
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    return line_of(Done(done.exit_code, done.stdout, done.stderr))


def line_of(done: Done) -> str:
    """The line that says why a command was refused."""
    assert (done.code, done.out) == (2, ""), done
    line = done.err.splitlines()[-1]
    assert line.startswith("mrl: ") and len(line) < 600, line
    return line


def conversation(model: str, turns: list[str], keys: list[str]) -> list[tuple[int, int]]:
    """`mrl generate --chat` with these turns on stdin: (tokens, how many of them were still in the cache) of each."""
    found: list[tuple[int, int]] = []
    begin = KeptSequences.begin

    def seen(self: KeptSequences, requests: Any, **how: bool) -> None:
        begin(self, requests, **how)
        found.append((len(requests[0].tokens), self.length(requests[0].key)))

    with mock.patch.object(KeptSequences, "begin", seen):
        asked = ["generate", model, "--chat", "--greedy", "--max-new-tokens", "8", *keys]
        done = command(asked, "/", "".join(f"{turn}\n" for turn in turns))
    assert done.code == 0, done.err
    return found


def interrupted(model: str, after: int) -> Done:
    """`mrl generate --chat` with two turns, where Ctrl-C comes after so many pieces of the first answer."""
    pieces, write = [], chat.write

    def counted(text: str) -> None:
        write(text)
        pieces.append(text)
        if len(pieces) == after:
            signal.raise_signal(signal.SIGINT)

    with mock.patch.object(chat, "write", counted):
        asked = ["generate", model, "--chat", "--greedy", "--system", "Be brief.", "--max-new-tokens", "24"]
        return command(asked, "/", "hello\nhello\n")


def with_stand_in_vllm(cwd: str) -> dict[str, Any]:
    """`mrl generate --backend vllm`: the names that vLLM got weights for, and what came out of it."""
    names: list[str] = []
    with stand_in_vllm.installed() as vllm:

        def load(self: Any, weights: Any) -> set[str]:
            names.extend(name for name, _ in weights)
            self.a.data.fill_(1.5)
            self.b.data.fill_(1.5)
            return {"a", "b"}

        with mock.patch.object(stand_in_vllm.Model, "load_weights", load):
            asked = [
                "generate",
                "runs/demo",
                "--backend",
                "vllm",
                "--prompt",
                "1+1=",
                "--greedy",
                "--out",
                "vllm.jsonl",
            ]
            done = command(asked, cwd, "")
        assert done.code == 0, done.err
        assert vllm.made[0].ended and vllm.made[0].arguments["dtype"] == "float32"
    (row,) = map(json.loads, pathlib.Path(cwd, "vllm.jsonl").read_text().splitlines())
    return {"names": names, **row}
