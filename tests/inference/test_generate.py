"""`mrl generate`: as transformers, token by token, on every family and layout; its options and its places."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.data.prompts import Prompt
from mrl.errors import ConfigError
from mrl.inference.generate import row_of
from mrl.inference.output import writing
from mrl.rollout.base import Trajectory
from tests.data.tiny_tokenizers import WITH_TOOLS, make_tokenizer, write_jsonl
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.inference.cases import greedy, line_of, mrl, refusal
from tests.tiers import in_tiers, nightly_but

PROMPTS = ["hello there!", "What is 2 + 2?", "the quick brown fox jumps over", "é"]
NEW_TOKENS = 12

# name -> (world size, KEY=VALUE)
LAYOUTS = {
    "megatron": (1, []),
    "megatron pp2": (2, ["engine.parallel.pp=2"]),
    "megatron cp2": (2, ["engine.parallel.cp=2"]),
    "megatron tp2 pp2": (4, ["engine.parallel.tp=2", "engine.parallel.pp=2"]),
    "fsdp": (1, ["engine.backend=fsdp"]),
    "fsdp dp2": (2, ["engine.backend=fsdp"]),
}
ROWS = [{"prompt": text, "answer": "x"} for text in PROMPTS]


def rows_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def completions(folder, tmp_path, *arguments: str, layout: str = "megatron", rows=ROWS) -> list[dict]:
    """The rows that `mrl generate --prompts --out` writes."""
    world, keys = LAYOUTS[layout]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    given = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out.jsonl", "--max-new-tokens", NEW_TOKENS]
    done = mrl("generate", folder, *given, *keys, *arguments, world=world)
    assert (done.code, done.out) == (0, ""), done.err
    return rows_of(tmp_path / "out.jsonl")


def greedy_of_transformers(folder) -> list[tuple[list[int], list[float], list[int]]]:
    """(new tokens, their log-probs, the prompt's tokens) of each prompt, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in PROMPTS:
        asked = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        new = greedy(model, ids, NEW_TOKENS, tokenizer.eos_token_id)
        with torch.no_grad():
            log_probs = model(torch.tensor([[*ids, *new]])).logits[0].log_softmax(-1)
        found.append((new, [float(log_probs[len(ids) + i - 1, token]) for i, token in enumerate(new)], ids))
    return found


@pytest.mark.parametrize(("backend", "family"), [("megatron", "qwen3_5"), ("fsdp", "gpt_oss")])
def test_greedy_is_as_transformers(folder, tmp_path, backend, family):
    """All families and layouts are in tests/engine/test_generation.py."""
    model = folder(family)
    found = completions(model, tmp_path, "--greedy", layout=backend)
    for row, (tokens, log_probs, prompt) in zip(found, greedy_of_transformers(model), strict=True):
        assert row["tokens"] == tokens and row["prompt_tokens"] == len(prompt)
        assert row["log_probs"] == pytest.approx(log_probs, abs=5e-5)
        assert row["finish_reason"] == ("stop" if len(tokens) < NEW_TOKENS else "length")


def without_log_probs(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "log_probs"} for row in rows]


SAMPLED = ["--samples", "3", "--temperature", "0.8", "--top-p", "0.95", "--seed", "5"]


@pytest.mark.parametrize(
    "layout", in_tiers([], ["megatron pp2"], ["megatron pp2", "megatron tp2 pp2", "megatron cp2", "fsdp dp2"])
)
def test_a_seed_gives_the_same_text_on_every_layout(folder, tmp_path, layout):
    model = folder("qwen3")
    first = completions(model, tmp_path, *SAMPLED)
    assert len({tuple(row["tokens"]) for row in first}) == len(first) == 3 * len(PROMPTS), "no two samples are alike"
    other = completions(model, tmp_path, *SAMPLED, layout=layout)
    assert without_log_probs(other) == without_log_probs(first)
    for one, two in zip(first, other, strict=True):
        assert two["log_probs"] == pytest.approx(one["log_probs"], abs=1e-5)


def test_what_a_row_of_results_has(folder, tmp_path):
    """Where it is from, messages and text alike, what else the row has, and why it ended; other seeds give other samples."""
    model = folder("qwen3")
    rows = [
        {"prompt": [{"role": "user", "content": "hello"}], "id": 7},
        {"prompt": "hello", "tools": [{"type": "function", "function": {"name": "sum"}}], "completion": "taken away"},
    ]
    first, second = completions(model, tmp_path, "--stop", "e", "--stop", "a", rows=rows)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert first["where"] == f"{tmp_path / 'prompts.jsonl'}:1" and first["id"] == 7 and first["sample"] == 0
    assert first["prompt"] == rows[0]["prompt"] and second["prompt"] == "hello" and second["tools"] == rows[1]["tools"]
    for row in (first, second):
        assert row["completion"] == tokenizer.decode(row["tokens"], skip_special_tokens=True) != "taken away"
        assert len(row["log_probs"]) == len(row["tokens"]) and max(row["log_probs"]) < 0, "those of prompts are 0"
        asked = [{"role": "user", "content": "hello"}], {"tools": row.get("tools"), "add_generation_prompt": True}
        assert row["prompt_tokens"] == len(tokenizer.apply_chat_template(asked[0], **asked[1])["input_ids"])
        ended = (
            any(stop in tokenizer.decode(row["tokens"]) for stop in "ea") or row["tokens"][-1] == tokenizer.eos_token_id
        )
        assert row["finish_reason"] == ("stop" if ended else "length")
    assert {first["finish_reason"], second["finish_reason"]} & {"stop"}
    again = completions(model, tmp_path, "--stop", "e", "--stop", "a", "--seed", "1", rows=rows)
    assert [row["tokens"] for row in again] != [first["tokens"], second["tokens"]]


@pytest.mark.parametrize(("cut_by", "reason"), [(None, "stop"), ("tokens", "length"), ("turns", "turns")])
def test_a_row_of_a_conversation_has_what_came_after_the_prompt(cut_by, reason):
    said = [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    prompt = Prompt(2, "rows.jsonl:3", {"prompt": "2+2", "answer": "4", "sample": 9}, "2+2", [5, 6, 7])
    made = Trajectory(
        prompt, 1, [5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 1, 0, 0, 1], [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, -0.25], "3\n\n4",
        cut_by is None, turns=2, conversation=said, cut_by=cut_by,
    )  # fmt: skip
    assert row_of(made) == {
        "where": "rows.jsonl:3", "prompt": "2+2", "sample": 1, "completion": "3\n\n4", "tokens": [8, 9, 10, 11],
        "log_probs": [-0.5, 0.0, 0.0, -0.25], "finish_reason": reason, "prompt_tokens": 3, "mask": [1, 0, 0, 1],
        "conversation": said, "answer": "4",
    }  # fmt: skip


def test_text_on_the_terminal(folder, tmp_path):
    """One completion is its text alone, from --prompt or stdin; several have a line before each. Notes are on stderr."""
    model = folder("qwen3")
    (expected, *others) = completions(model, tmp_path, "--greedy")
    few = ["--greedy", "--max-new-tokens", NEW_TOKENS]
    one = mrl("generate", model, "--prompt", PROMPTS[0], *few)
    assert (one.code, one.out) == (0, expected["completion"] + "\n")
    assert one.err == f"{model}: Hugging Face folder, float32 on 1 process\n"
    assert mrl("generate", model, *few, stdin=PROMPTS[0] + "\n").out == one.out
    two = mrl("generate", model, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *few)
    assert two.out == (
        f"== prompt 1: 'hello there!' (12 tokens, length)\n{expected['completion']}\n\n"
        f"== prompt 2: 'What is 2 + 2?' (12 tokens, length)\n{others[0]['completion']}\n\n"
    )
    sampled = mrl("generate", model, "--prompt", PROMPTS[0], "--samples", 2, "--max-new-tokens", 1)
    assert "== prompt 1, sample 2 of 2: 'hello there!' (1 token, " in sampled.out


def test_a_completion_ends_where_the_template_ends_turns(tmp_path):
    """The tokenizer's EOS is another token, and the model's folder does not name this one."""
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny.make_model(str(tmp_path / "model"), "qwen3", vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    out, asked = tmp_path / "out.jsonl", ["--prompt", "hello", "--samples", 200, "--max-new-tokens", 8]
    done = mrl("generate", model, *asked, "--out", out)
    assert done.code == 0 and done.err.count(f"ends a turn with '<|im_end|>' ({end})") == 1, done.err
    ended = [row for row in rows_of(out) if end in row["tokens"]]
    assert ended and all(row["tokens"].index(end) == len(row["tokens"]) - 1 for row in ended)
    assert {row["finish_reason"] for row in ended} == {"stop"}


def test_system_and_tools_reach_the_template(folder):
    """What a template is given shows in the tokens, and so in what a greedy model says."""
    model = folder("qwen3", template=WITH_TOOLS)

    def says(*arguments: object) -> str:
        return mrl("generate", model, "--prompt", "hello", "--greedy", "--max-new-tokens", 8, *arguments).out

    tokenizer, hf = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tools = [{"type": "function", "function": {"name": "sum"}}]
    path = pathlib.Path(model) / "tools.json"
    path.write_text(json.dumps(tools))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    expected = tokenizer.decode(greedy(hf, ids, 8, tokenizer.eos_token_id), skip_special_tokens=True)
    assert says("--system", "Be brief.", "--tools", path).rstrip("\n") == expected.rstrip("\n")
    assert len({says(), says("--system", "Be brief."), says("--tools", path)}) == 3


def test_a_model_without_a_template_goes_on_with_the_text(folder):
    model = folder("qwen3", template=None)
    tokenizer, hf = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer("the quick", add_special_tokens=False)["input_ids"]
    new = greedy(hf, ids, 6, tokenizer.eos_token_id)
    done = mrl("generate", model, "--prompt", "the quick", "--greedy", "--max-new-tokens", 6)
    assert done.out == tokenizer.decode(new, skip_special_tokens=True) + "\n"
    refused = mrl("generate", model, "--chat")
    assert refused.code == 2 and "--chat: the tokenizer has no chat template" in refused.err


@pytest.mark.parametrize("layout", nightly_but(["megatron"], ["megatron", "megatron tp2 pp2", "fsdp dp2"]))
def test_scores_are_those_of_transformers(folder, tmp_path, layout):
    """Of prompts and completions, in text and in messages; token by token."""
    model = folder("qwen3")
    rows = [
        {"prompt": "hello", "completion": " there"},
        {
            "prompt": [{"role": "user", "content": "hi!"}],
            "completion": [{"role": "assistant", "content": "What is 2?"}],
        },
        {"prompt": "the quick brown", "completion": "é"},
    ]
    world, keys = LAYOUTS[layout]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    scored = ["--prompts", tmp_path / "rows.jsonl", "--score", "--temperature", "0.5"]
    done = mrl("generate", model, *scored, "--out", tmp_path / "scores.jsonl", *keys, world=world)
    assert done.code == 0, done.err
    found = rows_of(tmp_path / "scores.jsonl")
    tokenizer, hf = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
    )
    for row, score in zip(rows, found, strict=True):
        said = row["completion"] if isinstance(row["completion"], str) else row["completion"][0]["content"]
        asked = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": said}])["input_ids"]
        whole = whole[: len(whole) - whole[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))]
        with torch.no_grad():
            log_probs = (hf(torch.tensor([whole])).logits[0] / 0.5).log_softmax(-1)
        expected = [float(log_probs[i - 1, whole[i]]) for i in range(len(before), len(whole))]
        assert score["tokens"] == whole[len(before) :]
        assert score["log_probs"] == pytest.approx(expected, abs=5e-5)
        assert score["sum"] == pytest.approx(sum(expected), abs=2e-4)
        assert score["mean"] == pytest.approx(sum(expected) / len(expected), abs=5e-5)
        assert score["prompt_tokens"] == len(before)
    total, count = sum(score["sum"] for score in found), sum(len(score["tokens"]) for score in found)
    shown = [str(count), f"{total:.3f}", f"{total / count:.4f}", f"{math.exp(-total / count):.4g}"]
    assert done.out.splitlines()[-1].split() == ["3", "rows", *shown]
    listed = mrl("generate", model, *scored).out.splitlines()
    assert (
        len(listed) == 5
        and listed[1].startswith(f"{tmp_path / 'rows.jsonl'}:1 ")
        and listed[-1] == done.out.splitlines()[-1]
    )


def test_what_was_sampled_has_the_scores_that_it_was_sampled_with(folder, tmp_path):
    """Rows of --out: their tokens as they are, whatever text they are; with the system message that they came after."""
    model, brief = folder("qwen3"), ("--system", "Be brief.")
    made = completions(model, tmp_path, "--samples", 2, *brief)
    scored = ["--prompts", tmp_path / "out.jsonl", "--score", "--out", tmp_path / "scores.jsonl"]
    for system, same in ((brief, True), ((), False)):
        done = mrl("generate", model, *scored, *system)
        assert done.code == 0, done.err
        for row, score in zip(made, rows_of(tmp_path / "scores.jsonl"), strict=True):
            assert score["tokens"] == row["tokens"]
            assert (score["log_probs"] == pytest.approx(row["log_probs"], abs=1e-5)) == same
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "hello", "completion": "there"}])
    refused = mrl("generate", model, "--prompts", tmp_path / "rows.jsonl", "--score", *brief)
    assert refused.code == 2 and "data.system: has no effect on" in refused.err


def test_a_long_chat_feeds_each_turn_once(folder):
    """What a turn has in common with the one before it is not computed anew, however many positions the model has."""
    model = folder("qwen3", max_position_embeddings=131_072)
    asked = {"model": model, "turns": ["hello there, hello there!", "What is 2 + 2?"]}
    (first, none), (second, kept) = run_case(1, "tests.inference.cases:conversation", **asked, keys=[])
    assert none == 0 and first <= kept < second
    bounded = run_case(1, "tests.inference.cases:conversation", **asked, keys=["rollout.cache_tokens=400"])
    assert bounded == [(first, none), (second, kept)], "nor with a bound that the user gives"


@pytest.mark.slow
def test_text_on_stdin_is_that_of_the_first_rank(folder):
    few = ("--greedy", "--max-new-tokens", 4)
    alone = mrl("generate", folder("qwen3"), "--prompt", "hello", *few)
    assert mrl("generate", folder("qwen3"), *few, "engine.parallel.tp=2", world=2, stdin="hello\n").out == alone.out


REFUSED = {
    "nothing asked": ((), "mrl generate: has no prompt; give --prompt TEXT"),
    "two ways": (("--prompt", "x", "--chat"), "--prompt: is given together with --chat; keep one of them"),
    "too many new tokens": (
        ("--prompt", "x", "--max-new-tokens", "128"),
        "rollout.max_new_tokens: value 128 leaves no prompt room in the model's 128 positions; give at most 127",
    ),
    "too many for the cache": (
        ("--prompt", "x", "--max-new-tokens", "64", "rollout.cache_tokens=50"),
        "rollout.max_new_tokens: value 64 leaves no prompt room in the 50 tokens of rollout.cache_tokens; give at most 49",
    ),
    "unknown key": (("--prompt", "x", "rollout.temprature=1"), "did you mean rollout.temperature?"),
    "greedy and a temperature": (("--prompt", "x", "--greedy", "--temperature", "0.5"), "rollout.temperature: value 0.5 has no effect"),
    "greedy samples": (("--prompt", "x", "--temperature", "0", "--samples", "2"), "rollout.samples_per_prompt: value 2 has no effect with --greedy, by which all"),
    "no section": (("--prompt", "x", "--greedy", "rollout=3"), "rollout: value 3 is a whole number; give keys of it"),
    "twice": (("--prompt", "x", "--top-k", "5", "rollout.top_k=4"), "rollout.top_k: is given by KEY=VALUE and by an option"),
    "no number": (("--prompt", "x", "--temperature", "hot"), "Invalid value for '--temperature': 'hot' is not a valid float"),
    "score without rows": (("--prompt", "x", "--score"), "--score: reads rows with completions"),
    "score and samples": (("--prompts", "long.jsonl", "--score", "--samples", "2"), "rollout.samples_per_prompt: value 2 has no effect"),
    "an environment in a chat": (("--chat", "rollout.environment=x.py:X"), 'rollout.environment: value "x.py:X" has no effect with --chat'),
    "out in no folder": (("--prompt", "x", "--out", "no/where.jsonl"), "--out: value 'no/where.jsonl' cannot be written"),
    "out over the prompts": (("--prompts", "long.jsonl", "--out", "long.jsonl"), "--out: is the file of the prompts"),
    "training keys": (("--prompt", "x", "engine.recompute=full"), "engine.recompute: value \"full\" is for training"),
    "tools that are none": (("--prompt", "x", "--tools", "odd.jsonl"), "--tools: value 'odd.jsonl' is no list of function schemas"),
    "no text": (("--prompt", ""), '--prompt: value "" is no prompt; give a text'),
    "a replay": (("--prompt", "x", "--backend", "recorded"), 'rollout.backend: value "recorded" replays a run'),
    "keys of rows": (("--prompt", "x", "data.columns={a: b}"), "data.columns: value {\"a\": \"b\"} is not used without a file of rows"),
    "rows as a key": (("--prompt", "x", "data.eval=long.jsonl"), 'data.eval: value "long.jsonl" has no effect here; give rows with --prompts'),
    "graphs of the other engine": (("--prompt", "x", "engine.backend=fsdp", "rollout.cuda_graphs=true"), "rollout.cuda_graphs: value true is not for engine.backend fsdp"),
    "a stop token beyond the vocabulary": (("--prompt", "x", "rollout.stop_tokens=[9999]"), "rollout.stop_tokens: value 9999 is no token of the model"),
    "a mixture": (("--prompts", "long.jsonl", "data.mix_by=tokens"), "data.mix_by: value \"tokens\" is not used here: rows are of one path"),
    "an order": (("--prompts", "long.jsonl", "data.shuffle=false"), "data.shuffle: value false is not used here: rows are taken in their order"),
}  # fmt: skip
REFUSED_BY_RANKS = {
    "no file": (("--prompts", "none.jsonl"), "data.eval: none.jsonl: there is no such file or folder"),
    "empty file": (("--prompts", "empty.jsonl"), "data.eval: empty.jsonl: the data set is empty; at least one row is needed"),
    "no prompt in the row": (("--prompts", "odd.jsonl"), "odd.jsonl:1: the fields text hold no prompt"),
    "too long": (("--prompt", "hello " * 200), "prompt 1: the prompt has 214 tokens, and 64 is the most that the model's 128 positions leave"),
    "too long in a file": (("--prompts", "long.jsonl", "rollout.cache_tokens=100"), "long.jsonl:1: the prompt has 214 tokens, and 50 is the most that the 100 tokens of rollout.cache_tokens leave"),
    "too long to score": (("--prompts", "done.jsonl", "--score"), "done.jsonl:1: the row has 219 tokens, more than the model's 128 positions; shorten it"),
    "a mask of another length": (("--prompts", "masked.jsonl", "--score"), "masked.jsonl:1: has a mask that is not 0 or 1 for each of its tokens; leave it out"),
    "longer than asked for": (("--prompt", "hello there", "data.max_prompt_length=3"), "data.max_prompt_length is 3"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "odd.jsonl").write_text('{"text": "x"}\n')
    write_jsonl(tmp_path / "long.jsonl", [{"prompt": "hello " * 200}])
    write_jsonl(tmp_path / "done.jsonl", [{"prompt": "hello " * 200, "completion": "there!"}])
    write_jsonl(tmp_path / "masked.jsonl", [{"prompt": "x", "tokens": [3, 4], "mask": [1]}])
    there = sorted(path.name for path in tmp_path.iterdir())
    yield tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == there, "something was written"


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_before_ranks_start(folder, files, name):
    arguments, says = REFUSED[name]
    assert says in refusal("generate", folder("qwen3"), *arguments, cwd=files)


@pytest.mark.parametrize("name", REFUSED_BY_RANKS)
def test_is_refused_in_one_line(folder, files, name):
    arguments, says = REFUSED_BY_RANKS[name]
    assert says in line_of(mrl("generate", folder("qwen3"), *arguments, cwd=files))


def test_a_full_disk_is_one_line():
    """Of --out and of stdout: closing a file writes again what the disk did not take."""
    main = types.SimpleNamespace(is_main=True)
    with (
        pytest.raises(ConfigError, match=r"^--out: .*cannot be written \(No space left on device\)"),
        writing("/dev/full", main) as write,
    ):
        write({"text": "a"})
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mrl", "config", "sft"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith("mrl: the output: cannot be written (No space left")
