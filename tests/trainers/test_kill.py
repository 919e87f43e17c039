"""A run of `mrl sft`, `mrl dpo` or `mrl rm` that is killed by SIGKILL and started again is the run that was not killed:
metrics, weights, optimizer, data order.

The moments are drawn with a seed from all events of a run (tests/trainers/kills.py). What a second start restores is
compared bit by bit: metrics but for timings, the exported model, and the files of the last checkpoint, which hold
optimizer state, RNG, LR schedule and the position in the data (traps 23, 25, 32, 33).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import random
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.harness import Case, run_case, run_world
from tests.trainers import tiny_runs

MOMENTS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """world: processes. engine, more: sections of the config. quick: moments of the slow tier, the others are of the nightly
    one."""

    world: int
    engine: dict
    quick: int = 0
    command: str = "sft"
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


MEGATRON_TP2 = {"backend": "megatron", "parallel": {"tp": 2}}
LAYOUTS = {
    "fsdp": Layout(1, {"backend": "fsdp"}, quick=1),
    "fsdp dp2": Layout(2, {"backend": "fsdp"}),
    "megatron tp2": Layout(2, MEGATRON_TP2),
    "dpo, fsdp dp2, with a cache": Layout(
        2, {"backend": "fsdp"}, command="dpo", more={"loss": {"name": "dpo"}, "reference": {"cache": True}}
    ),
    "kto, megatron, adapters": Layout(
        1, {"backend": "megatron"}, command="dpo",
        more={"loss": {"name": "kto"}, "model": {"lora": {"rank": 4, "dropout": 0.1}}},
    ),
    "rm, megatron tp2": Layout(2, MEGATRON_TP2, command="rm", more={"loss": {"name": "bradley_terry"}}),
    "teacher with a cache, fsdp dp2": Layout(
        2, {"backend": "fsdp"}, more={"teacher": {"loss": "jsd", "top_k": 5, "cache": True}}
    ),
    "teacher, streamed, megatron tp2": Layout(
        2, MEGATRON_TP2, more={"teacher": {"top_k": 5}, "data": {"stream": True, "shuffle_buffer": 3}}
    ),
}  # fmt: skip
TIER = {False: pytest.mark.slow, True: pytest.mark.nightly}
CASES = [
    pytest.param(name, moment, marks=TIER[moment >= layout.quick], id=f"{name} {moment}")
    for name, layout in LAYOUTS.items()
    for moment in range(MOMENTS)
]


def config_of(inputs: pathlib.Path, output_dir: pathlib.Path, layout: Layout) -> dict:
    rows = {part: inputs / f"{part}.jsonl" for part in ("train", "eval")}
    if layout.command != "sft":
        rows = {part: pairs_like(path) for part, path in rows.items()}
    own = dict(layout.more)
    data = {part: str(path) for part, path in rows.items()} | own.pop("data", {})
    if "teacher" in own:
        own["teacher"] = own["teacher"] | {"model": {"path": str(teacher_beside(inputs))}}
    return tiny_runs.make_config(
        inputs, output_dir, engine=layout.engine, train={"steps": 4, "eval_every": 2}, checkpoint={"every": 1},
        data=data, **own,
    )  # fmt: skip


def teacher_beside(inputs: pathlib.Path) -> pathlib.Path:
    """Returns a folder with the model of `inputs` and other weights."""
    folder = inputs / "teacher"
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(inputs / "model")
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        shutil.copytree(inputs / "model", folder)
        model.save_pretrained(folder)
    return folder


def pairs_like(path: pathlib.Path) -> pathlib.Path:
    """Returns a file with a pair for each row of conversations at `path`: its answer and a longer one."""
    talks = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    texts = [(asked["content"], said["content"]) for asked, said in talks]
    rows = [{"prompt": asked, "chosen": said, "rejected": said + "0", "weight": 1 + len(said)} for asked, said in texts]
    made = path.with_name(f"pairs-{path.name}")
    made.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def contents(folder: pathlib.Path) -> dict[str, str]:
    """What the files of a run's export and last checkpoint hold, in words that are equal where they are."""
    last, result = folder / "checkpoints" / "step_00000004", {}
    for path in sorted((folder / "hf").rglob("*")) + sorted(last.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            if "state" in state:  # the trainer's: names this run's folder, and an id that is random by design
                state["state"]["config"]["output_dir"], state["state"]["progress"]["run_id"] = "", ""
            result[name] = repr(plain(state))
        elif path.is_file() and path.name not in ("COMPLETE", ".metadata"):  # serial numbers, and ids of the writer
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


def plain(state: Any) -> Any:
    """Nested state with its tensors as lists."""
    if isinstance(state, torch.Tensor):
        return state.dtype, state.tolist()
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return [plain(item) for item in state] if isinstance(state, list | tuple) else state


@pytest.fixture(scope="session")
def whole(inputs, tmp_path_factory):
    """layout -> (the folder of a run that nothing happened to, the number of events on rank 0 of a run like it)."""
    made = {}

    def of(name: str) -> tuple[pathlib.Path, int]:
        if name not in made:
            layout, folder = LAYOUTS[name], tmp_path_factory.mktemp("whole")
            configs = [config_of(inputs, folder / run, layout) for run in ("first", "second")]
            how = {"rank": 0, "command": layout.command}
            # libraries touch the disk more often in a process's first run
            counts = [run_case(layout.world, "tests.trainers.kills:count", config=one, **how) for one in configs]
            made[name] = folder / "first", min(counts)
        return made[name]

    return of


@pytest.mark.parametrize("name, moment", CASES)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(inputs, whole, tmp_path, name, moment):
    unharmed, events = whole(name)
    layout, draw = LAYOUTS[name], random.Random(f"{name} {moment}")
    output_dir = tmp_path / "run"
    config = config_of(inputs, output_dir, layout)
    for kill in range(draw.choice([1, 1, 2])):
        event = draw.randrange(events)
        killed = tmp_path / f"killed{kill}"
        details = {"config": config, "event": event, "rank": 0, "killed": str(killed), "command": layout.command}
        case = Case("tests.trainers.kills:train_until", details)
        (result,) = run_world(layout.world, [case])
        done_before = kill > 0 and result.error is None  # what is left after a kill may have fewer events
        assert killed.exists() or done_before, result.error
    of_command = {"sft": "cases"}.get(layout.command, f"{layout.command}_cases")
    ended = run_case(layout.world, f"tests.trainers.{of_command}:train", config=config)
    assert ended[:2] == ("done", ""), f"killed at event {event} of {events}: {ended}"
    assert tiny_runs.steps(output_dir) == tiny_runs.steps(unharmed)
    assert contents(output_dir) == contents(unharmed)
    leftovers = [p.name for p in (output_dir / "checkpoints").iterdir() if p.name.startswith(".")]
    assert not leftovers and not (output_dir / ".tmp-hf").exists()
