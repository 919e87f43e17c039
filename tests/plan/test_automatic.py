"""The numbers that `auto` stands for, by real plans: they fit with a margin, and none that fits takes less time."""

from __future__ import annotations

import json
import re

import pytest

from mrl.launch import automatic
from tests.cuda import models
from tests.plan.test_command import TINY
from tests.tiers import in_tiers, nightly_but

CONFIGS = {
    "sft": "model: {path: tiny}\nteacher: {model: {path: tiny}, top_k: 4}\ndata: {train: none.jsonl, max_length: 512}\n",
    "dpo": "model: {path: tiny}\nloss: {name: dpo}\ndata: {train: none.jsonl, max_length: 512}\n",
    "ppo": "actor: {model: {path: tiny}}\nalgorithm: {name: ppo, kl_in: loss, kl_coef: 0.01}\n"
    "reward: {model: {path: tiny}}\ndata: {train: none.jsonl, max_prompt_length: 256}\nrollout: {max_new_tokens: 256}\n",
}
GPU, ROOM = "GB=5.2", 0.9 * 5.2e9 - 4 * 2**30
"""ROOM: bytes that are taken of it, but for the margin."""
SECTIONS = {
    "sft": ("engine", "teacher.engine"), "dpo": ("engine", "reference.engine"),
    "ppo": tuple(f"{role}.engine" for role in ("actor", "critic", "reference", "reward")),
}  # fmt: skip
ALL = {"sft": ("update", "teacher"), "dpo": ("update", "reference"), "ppo": ("actor", "critic", "reference", "reward")}
"""Words in the names of phases: those of the roles that inherit the first section."""
KINDS = [
    (name, section, inherits) for name, all_of in SECTIONS.items() for section in all_of for inherits in (True, False)
    if section == all_of[0] or not inherits
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("auto")
    models.write("Qwen/Qwen3-8B", path / "tiny", 2, **TINY | {"vocab_size": 8192})
    for name, text in CONFIGS.items():
        (path / f"{name}.yaml").write_text(f"output_dir: run\ntrain: {{steps: 1, global_batch_size: 128}}\n{text}")
    return path


@pytest.fixture
def plan(planner, folder):
    """Returns the phases of `mrl plan --json` with bytes of each, and its notes."""

    def run(*words: str, gpu: str = GPU) -> tuple[dict[str, int], list[str]]:
        done = planner.call("tests.plan.planned:command", ["plan", *words, "--gpu", gpu, "--json"], str(folder))
        assert done.exit_code in (0, 2) and done.stdout, done.stderr
        told = json.loads(done.stdout)
        return {use["phase"]: use["total"] for use in told["phases"]}, told["notes"]

    return run


def number_in(notes: list[str], key: str) -> int:
    [line] = [note for note in notes if note.startswith(f"{key}: auto is ")]
    found = re.search(r"auto is (?:the default, )?([\d,]+), ", line)
    assert found is not None, line
    return int(found[1].replace(",", ""))


def changed(name: str, section: str, inherits: bool, phases: dict[str, int]) -> list[int]:
    """Bytes of the phases that a section's micro-batches change."""
    words = ALL[name] if inherits else [ALL[name][SECTIONS[name].index(section)]]
    return [size for phase, size in phases.items() if phase != "sampling" and any(word in phase for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "section", "inherits"),
    in_tiers(
        [("ppo", "actor.engine", True), ("dpo", "reference.engine", False)],
        [("sft", "engine", True)],
        KINDS,
    ),
)
def test_the_number_fits_with_a_margin_and_twice_it_does_not(plan, name, section, inherits):
    longest = 1024 if name == "dpo" else 512
    own = [] if inherits else [f"{other}={{micro_batch: {{size: 2}}}}" for other in SECTIONS[name] if other != section]
    key = f"{section}.micro_batch.tokens"
    words = [f"{name}.yaml", "-n", "1", *own]
    phases, notes = plan(*words, f"{key}=auto")
    number = number_in(notes, key)
    assert number % longest == 0 and longest <= number <= 32768
    assert max(changed(name, section, inherits, phases)) <= ROOM
    if number < 32768:
        more, _ = plan(*words, f"{key}={2 * number}")
        assert max(changed(name, section, inherits, more)) > ROOM


@pytest.fixture
def sft_on_h200(planner, folder):
    """Returns what `mrl plan --json` says of some ranks, in pipeline stages, and of sequences a step."""

    def run(ranks: int, sequences: int, tokens: int | str) -> dict:
        words = ["plan", "sft.yaml", "teacher=null", "-n", str(ranks), f"engine.parallel.pp={ranks}", "--gpu", "h200"]
        more = [f"engine.micro_batch.tokens={tokens}", f"train.global_batch_size={sequences}", "--json"]
        return json.loads(planner.call("tests.plan.planned:command", [*words, *more], str(folder)).stdout)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sequences", "number"),
    nightly_but([(2, 9, 32768), (1, 128, 32768)], [(2, 9, 32768), (1, 128, 32768), (2, 128, 8192)]),
)
def test_the_number_is_the_most_that_takes_the_least_time(sft_on_h200, ranks, sequences, number):
    """Nine sequences are 8 and 1 by default, and two stages wait longer for these than for one micro-batch. Without
    stages all numbers take as long."""
    assert number_in(sft_on_h200(ranks, sequences, "auto")["notes"], "engine.micro_batch.tokens") == number
    times = {tokens: sft_on_h200(ranks, sequences, tokens)["step_seconds"] for tokens in (4096, 8192, 16384, 32768)}
    least = min(times.values()) * (1 + automatic.TIE)
    assert times[number] <= least and all(time > least for tokens, time in times.items() if tokens > number)
    assert (times[4096] > least) == (sequences == 9)


def test_the_cache_is_what_sampling_leaves_or_what_a_step_needs(plan):
    words = ["ppo.yaml", "-n", "1", "actor.engine.micro_batch.size=1"]
    phases, notes = plan(*words, "rollout.cache_tokens=auto", "train.global_batch_size=8192")
    number = number_in(notes, "rollout.cache_tokens")
    assert number % 512 == 0 and 65536 < number < 8192 * 512 and phases["sampling"] <= ROOM
    _, notes = plan(*words, "rollout.cache_tokens=auto", "train.global_batch_size=256")
    assert number_in(notes, "rollout.cache_tokens") == 256 * 512 and "enough for all sequences of a step" in notes[-1]


def test_what_is_not_known_is_the_default(plan):
    _, notes = plan(
        "ppo.yaml", "-n", "2", "actor.engine={backend: fsdp, micro_batch: {tokens: auto}}", "rollout.cache_tokens=auto"
    )
    why = "because mrl plan does not know what it takes"
    assert notes == [
        f"actor.engine.micro_batch.tokens: auto is the default, 4,096, {why}", f"rollout.cache_tokens: auto is the default, 65,536, {why}"
    ]  # fmt: skip


def test_a_layout_of_more_ranks_leaves_more(plan):
    """It is planned for all ranks, and each of them on a GPU of its own: 4,096 tokens take 101 MiB, or 83 of two."""
    key = "engine.micro_batch.tokens"
    one, two = (
        number_in(
            plan("sft.yaml", "teacher=null", "-n", n, f"{key}=auto", f"engine.parallel.tp={n}", gpu="GB=4.88")[1], key
        )
        for n in "12"
    )
    assert one < two
