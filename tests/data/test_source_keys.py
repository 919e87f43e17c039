"""Every key of `data` and of its sources, over every kind of source: it changes what rows become, or is refused."""

from __future__ import annotations

import functools
import gzip

import datasets
import fsspec
import pytest

from mrl.commands.dpo import COMMAND as DPO
from mrl.commands.ppo import COMMAND as PPO
from mrl.commands.rm import COMMAND as RM
from mrl.commands.sft import COMMAND as SFT
from mrl.config.keys import section_keys
from mrl.config.load import from_dict
from mrl.config.sources import PreferenceShare, PromptShare, ScoredShare, SFTShare
from mrl.data.dataset import SFTDataset
from mrl.data.mixture import eval_rows, train_rows
from mrl.data.preferences import PreferenceDataset
from mrl.data.prompts import PromptDataset
from mrl.data.scored import ScoredDataset
from mrl.data.stream import RowStream
from mrl.errors import UserError
from tests.data.test_rows import hub_in
from tests.data.tiny_tokenizers import CHATML, make_tokenizer, write_jsonl
from tests.tiers import nightly_but

COMMANDS = {"sft": SFT, "dpo": DPO, "rm": RM, "ppo": PPO}
SHARES = {"sft": SFTShare, "dpo": PreferenceShare, "rm": ScoredShare, "ppo": PromptShare}
WORDS = ["fox", "the quick brown fox jumps over the dog", "4", "lazy dog", "What is 2 + 2?", "a", "b", "hello there"]
ANSWERS = {
    "sft": {"completion": "fox"}, "dpo": {"chosen": "fox", "rejected": "dog"}, "rm": {"chosen": "fox", "rejected": "dog"},
    "ppo": {"answer": "fox"},
}  # fmt: skip
STREAMED = ("streamed file", "streamed glob", "streamed hub", "streamed URL")
KINDS = ("jsonl", "jsonl.gz", "parquet", "folder", "glob", "saved", "splits", "hub", *STREAMED)
OF_A_RUN = {"packing": "of micro-batches", "train": "the path itself", "eval": "walked as a part of its own"}
"""Keys of `data` that are no one's to read a row by: tests/config/test_keys_reach.py has those that the engine reads."""


def rows_of(command, name=""):
    rows = [{"prompt": f"{name}{word}", **ANSWERS[command], "tag": "x"} for word in WORDS]
    return [{**rows[0], "only": "y"}, *rows[1:]]


@pytest.fixture(scope="module", params=COMMANDS)
def made(request, tmp_path_factory):
    """The command, and the path of the same rows in each kind of source."""
    command, folder = request.param, tmp_path_factory.mktemp("sources")
    rows = rows_of(command)
    jsonl = write_jsonl(folder / "a.jsonl", rows)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(folder / "a.parquet")
    table.save_to_disk(folder / "saved")
    more = datasets.Dataset.from_list(rows[::-1])
    datasets.DatasetDict({"train": table, "test": table, "more": more}).save_to_disk(folder / "splits")
    for name, of_split in (("train", rows), ("test", rows)):
        (folder / "hub").mkdir(exist_ok=True)
        write_jsonl(folder / "hub" / f"{name}.jsonl", of_split[:: 1 if name == "train" else -1])
    (folder / "parts").mkdir()
    write_jsonl(folder / "parts" / "a.jsonl", rows[:4])
    write_jsonl(folder / "parts" / "b.jsonl", rows[4:])
    write_jsonl(folder / "other.jsonl", rows_of(command, "other "))
    fsspec.filesystem("memory").pipe(f"/keys/{command}.jsonl", (folder / "a.jsonl").read_bytes())
    (folder / "loud.jinja").write_text(CHATML.replace("<|im_start|>", "<|im_start|>!"))
    paths = {
        "jsonl": jsonl, "jsonl.gz": f"{jsonl}.gz", "parquet": folder / "a.parquet", "folder": folder / "parts",
        "glob": folder / "parts" / "*", "saved": folder / "saved", "splits": folder / "splits", "hub": "someone/rows",
        "streamed file": jsonl, "streamed glob": folder / "parts" / "*", "streamed hub": "someone/rows",
        "streamed URL": f"memory://keys/{command}.jsonl",
    }  # fmt: skip
    assert set(paths) == set(KINDS)
    return command, folder, {kind: str(path) for kind, path in paths.items()}


def config_of(command, folder, data):
    raw = {"output_dir": str(folder / "run"), "train": {"steps": 2, "global_batch_size": 8}}
    most = {"max_prompt_length": 64} if command == "ppo" else {"max_length": 64}
    raw["data"] = most | data
    if command == "ppo":
        raw |= {"actor": {"model": {"path": "m"}}, "algorithm": {"name": "grpo"}, "rollout": {"samples_per_prompt": 4}}
        raw["rewards"] = {"functions": [{"name": "length", "maximum": 4}]}
    else:
        raw["model"] = {"path": "m"}
    if command in ("dpo", "rm"):
        raw["loss"] = {"name": {"dpo": "dpo", "rm": "bradley_terry"}[command]}
    return from_dict(raw, COMMANDS[command].root)


TOKENIZER = make_tokenizer()  # each data set copies it


def open_one(command, part, data):
    tokenizer = TOKENIZER
    if command == "sft":
        return SFTDataset(data, tokenizer, part=part)
    if command == "dpo":
        return PreferenceDataset(data, tokenizer, part=part, paired=True)
    if command == "rm":
        return ScoredDataset(data, tokenizer, part=part, loss="bradley_terry", pad_token_id=0)
    return PromptDataset(data, tokenizer, part=part)


def outcome(command, folder, data, part="train") -> str:
    """What the first rows of a run become, in words; the error where it is refused."""
    try:
        config = config_of(command, folder, data)
        make = functools.partial(open_one, command, part)
        if part == "eval":
            return str([[rows.load(i) for i in range(len(rows))] for rows in eval_rows(config.data, make).values()])
        stream = RowStream(train_rows(config.data, make), seed=0, shuffle=config.data.shuffle)
        taken = zip(range(3 * len(WORDS)), stream.walk(), strict=False)
        found = str([(stream.dataset.where(one.rows[0]), one.items[0]) for _, one in taken])
        stream.dataset.close()
        return found
    except UserError as error:
        return f"refused: {error}"


def values(command, folder):
    """Of each key the values that are tried, and what else is set then."""
    long = {"truncation": "error", "max_prompt_length" if command == "ppo" else "max_length": 10}
    wrong = {"sft": "text", "dpo": "unpaired", "rm": "graded"}
    return {
        "split": [("nonsense", {}), ("more", {}), ("test", {})], "columns": [({"tag": "system"}, {})],
        "chat_template": [(str(folder / "loud.jinja"), {})], "shuffle": [(False, {})],
        "on_bad_row": [("skip", {"columns": {"only": "unused"}})], "stream": [(True, {}), (False, {})],
        "shuffle_buffer": [(1, {}), (3, {})], "mix_by": [("tokens", {})], "format": [(wrong.get(command), {})],
        "loss_on": [("all", {})], "system": [("be good", {})], "teacher": [("x", {})], "max_length": [(12, {})],
        "max_prompt_length": [(12, {})], "truncation": [("drop", long), ("left", long)], "prompt_end": [("x", {})],
        "step_separator": [("x", {})], "name": [("other_name", {})], "weight": [(3, {}), (None, {})],
        "epochs": [(1, {}), (0.5, {})], "turns": [({"user": "Q:", "assistant": "A:"}, {})], "path": [(str(folder / "other.jsonl"), {})],
    }  # fmt: skip


def unread(command, folder, base, put, tried) -> list[str]:
    """Which values change nothing, and are not refused. put: returns `base` with a key's value in it."""
    found, before = [], {}
    for name, pairs in tried.items():
        for value, beside in pairs:
            with_it = {**base, **beside}
            if str(beside) not in before:
                before[str(beside)] = outcome(command, folder, with_it)
            after = outcome(command, folder, put(with_it, name, value))
            if before[str(beside)] == after:
                found.append(f"{name}={value}: {after[:120]}")
    return found


def in_data(base, name, value):
    return base | {name: value}


def in_source(base, name, value):
    first, *others = base["train"]
    return base | {"train": [first | {name: value}, *others]}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", nightly_but([0], range(4)))
def test_every_key_of_every_kind_of_source_is_read_or_refused(made, monkeypatch, kinds):
    """kinds: a quarter of them, another one of each command; all are walked at night."""
    command, folder, paths = made
    hub_in(folder / "hub", monkeypatch)
    monkeypatch.setattr("mrl.data.stream.MAX_SKIPPED_IN_A_ROW", 20)
    tried = values(command, folder)
    keys = {key.path for key in section_keys(type(config_of(command, folder, {"train": "a"}).data))} - OF_A_RUN.keys()
    own = {key.path for key in section_keys(SHARES[command])}
    assert keys | own <= tried.keys(), "give each key a value here"
    for kind in KINDS[(list(COMMANDS).index(command) + kinds) % 4 :: 4]:
        path, stream = paths[kind], {"stream": True} if kind in STREAMED else {}
        if stream and command == "ppo":
            continue
        plain = {"train": path, **stream}
        wrong = unread(command, folder, plain, in_data, {k: tried[k] for k in keys})
        shares = [
            {"path": path, "weight": 1, "name": "s", **stream},
            {"path": str(folder / "other.jsonl"), "weight": 1},
        ]
        wrong += unread(command, folder, {"train": shares}, in_source, {k: tried[k] for k in own})
        default = f"stream={bool(stream)}: "  # as it is without the key
        assert not [line for line in wrong if not line.startswith(default)], (kind, wrong)
