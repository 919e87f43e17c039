"""`mrl data show`: rows as a run reads them, in its order, with what trains marked."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.commands import data as record
from mrl.data.show import TRAINS, ShownSequence, text_lines
from mrl.data.stream import row_order
from tests.data.tiny_tokenizers import make_tokenizer, write_jsonl
from tests.trainers import tiny_runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_runs.make_inputs(folder)
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 20)} for i in range(6)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    sft = tiny_runs.make_config(folder, folder / "run", data={"eval": str(folder / "eval.jsonl")})
    pairs_alone = {"train": str(folder / "pairs.jsonl"), "max_length": 64}
    grpo = {
        "output_dir": str(folder / "rl"), "actor": {"model": sft["model"]}, "algorithm": {"name": "grpo"},
        "rewards": {"functions": [{"name": "length", "maximum": 4}]}, "data": {"train": str(folder / "pairs.jsonl")},
        "train": {"steps": 3, "global_batch_size": 8}, "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8},
    }  # fmt: skip
    serve = {"output_dir": str(folder / "s"), "model": sft["model"], "serve": {"port": 1}}
    configs = {"sft": sft, "dpo": sft | {"loss": {"name": "dpo"}, "data": pairs_alone}, "grpo": grpo, "serve": serve}
    configs["rm"] = sft | {"loss": {"name": "bradley_terry"}, "data": pairs_alone}
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def whole(inputs, name: str, *words: str) -> list[str]:
    done = CliRunner().invoke(cli.main, ["data", "show", str(inputs / f"{name}.yaml"), *words])
    assert done.exit_code == 0, done.output
    return done.stdout.replace(f"{inputs}/", "").splitlines()


def show(inputs, name: str, *words: str) -> list[str]:
    """What `data show` prints below the line on the command."""
    first, *lines = whole(inputs, name, *words)
    assert first.startswith("read as a config of mrl ")
    return lines


def test_rows_are_shown_in_the_order_of_the_run_with_what_trains_between_marks(inputs):
    lines = show(inputs, "sft", "--rows", "10")
    places = [int(found[1]) for line in lines if (found := re.match(r"train.jsonl:(\d+): \d+ tokens, \d train$", line))]
    assert places == [row + 1 for row in row_order(0, 0, 10).tolist()]
    first = lines.index("train.jsonl:3: 17 tokens, 2 train")
    assert lines[first + 1 : first + 5] == [
        "  <|im_start|>user", "  2+2+2=<|im_end|>", "  <|im_start|>assistant", "  ⟦6<|im_end|>⟧",
    ]  # fmt: skip
    assert "all rows: 10 sequences, 151 tokens, 23 train (15.2 %)" in lines
    assert "tokens of a sequence: mean 15.1, median 15, 95 % within 18, longest 18" in lines


@pytest.mark.parametrize(
    ("name", "words", "says", "row"),
    [
        ("sums", (), "read as a config of mrl sft (--as for another)", "train.jsonl:3: 17 tokens, 2 train"),
        ("pairs", (), "read as a config of mrl dpo (--as for another)", "pairs.jsonl:3: chosen: "),
        ("pairs", ("--as", "rm"), "read as a config of mrl rm", "pairs.jsonl:3: chosen: "),
        ("prompts", (), "read as a config of mrl ppo (--as for another)", "pairs.jsonl:3: "),
    ],
)
def test_the_rows_and_a_tokenizer_suffice(inputs, tmp_path, name, words, says, row):
    """Neither output_dir nor a batch, a loss, an algorithm or rewards; the model's folder has a tokenizer alone."""
    model = yaml.safe_load((inputs / "sft.yaml").read_text())["model"]["path"]
    for file in (*pathlib.Path(model).glob("*token*"), *pathlib.Path(model).glob("*.jinja")):
        shutil.copy(file, tmp_path)
    of_model = {"model": {"path": str(tmp_path)}}
    rows = {"train": str(inputs / ("train.jsonl" if name == "sums" else "pairs.jsonl"))}
    data = {"sums": rows, "pairs": {**rows, "format": "preference"}, "prompts": rows}[name]
    config = {"data": data, **({"actor": of_model} if name == "prompts" else of_model)}
    (inputs / "few.yaml").write_text(yaml.safe_dump(config))
    lines = whole(inputs, "few", "--rows", "9", *words)
    assert lines[0] == says and any(line.startswith(row) for line in lines), lines


def test_no_command_without_rows_is_offered(inputs):
    done = CliRunner().invoke(cli.main, ["data", "show", str(inputs / "sft.yaml"), "--as", "serve"])
    assert done.exit_code == 2 and "'dpo'" in done.output and done.output.count("serve") == 1


def test_count_reads_all(inputs):
    keys = ["data.truncation=drop", "data.max_length=15"]
    lines = show(inputs, "sft", "--count", "--rows", "0", *keys)
    assert "rows used: 6, skipped: 0, dropped: 4, truncated: 0" in lines
    lines = show(inputs, "sft", "--rows", "1", "data.truncation=right", "data.max_length=17", "data.loss_on=all")
    assert "rows used: 10, skipped: 0, dropped: 0, truncated: 2" in lines


@pytest.mark.parametrize(
    ("name", "keys", "first", "number", "cuts"),
    [
        ("sft", ["data.max_length=15"], "train.jsonl:3: 17 tokens, 2 train; too long", 4, "right or left or drop"),
        ("dpo", ["data.max_length=15"], "pairs.jsonl:1: chosen: 15 tokens, 2 train; too long", 6, "drop"),
        (
            "grpo", ["data.max_prompt_length=11", "data.columns={chosen: answer}"],
            "pairs.jsonl:1: prompt: 12 tokens, a prompt; too long", 6, "left or drop",
        ),
    ],
)  # fmt: skip
def test_rows_that_are_too_long_for_the_run_are_shown_and_counted(inputs, name, keys, first, number, cuts):
    """The lengths of all rows are what one chooses the limit by."""
    limit, *others = keys
    whole = show(inputs, name, "--count", "--rows", "0", *others)
    done = CliRunner().invoke(cli.main, ["data", "show", str(inputs / f"{name}.yaml"), "--count", "--rows", "9", *keys])
    out = done.stdout.replace(f"{inputs}/", "")
    assert done.exit_code == 2 and first in out.splitlines() and whole[-2] in out.splitlines()
    assert f"rows used: {int(whole[-1].split()[2][:-1]) - number}, " in out and f", too long: {number}" in out
    limit = limit.replace("=", " ")
    assert f"mrl: data.train: {number} rows that were read are longer than {limit}, as " in done.stderr
    assert done.stderr.endswith(f"and a run stops there; raise it, or set data.truncation to {cuts}\n")


def test_rows_that_are_streamed_are_shown_in_their_order_and_not_counted(inputs):
    lines = show(inputs, "sft", "--rows", "2", "data.stream=true", "data.shuffle_buffer=0")
    assert lines[0] == "data.train: train.jsonl: streamed rows of the format messages"
    assert [line[:13] for line in lines if re.match(r"train.jsonl:\d", line)] == ["train.jsonl:1", "train.jsonl:2"]
    assert "the first 10 rows that are used: 10 sequences, 151 tokens, 23 train (15.2 %)" in lines  # one pass
    words = ["data", "show", str(inputs / "sft.yaml"), "--count", "data.stream=true"]
    done = CliRunner().invoke(cli.main, words)
    assert "--count: reads every row, and those of data.train are streamed" in done.output


def test_pairs_of_a_reward_model_are_read_once_each(inputs):
    lines = show(inputs, "rm", "--rows", "1", "--tokens")
    first = lines.index("pairs.jsonl:1: chosen: 15 tokens, 1 train")
    assert [line.split()[2] for line in lines[first + 2 : first + 17]] == ["0"] * 14 + ["1"]


def test_where_scores_are_read_is_marked_with_what_they_should_be(inputs):
    """Also where the token is white space, as the newline with which the template ends a turn."""
    steps = {"prompt": "1+2=", "completions": ["3", "4"], "labels": [True, False]}
    graded = {"prompt": "1+2=", "completion": "3", "score": 0.25}
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "4", "margin": 0.5}
    text = ["  <|im_start|>user", "  1+2=<|im_end|>", "  <|im_start|>assistant"]
    for loss, row, says in (
        ("steps", steps, [": 17 tokens, 2 train", *text, "  3⟦label 1: \\n⟧", "  4<|im_end|>⟦label 0: \\n⟧"]),
        ("regression", graded, [": 15 tokens, 1 train", *text, "  3<|im_end|>⟦score 0.25: \\n⟧"]),
        ("bradley_terry", pair, [": chosen: 15 tokens, 1 train, margin 0.5", *text, "  3<|im_end|>⟦\\n⟧"]),
    ):
        path = write_jsonl(inputs / f"{loss}.jsonl", [row] * 8)
        lines = show(inputs, "rm", "--rows", "1", f"loss.name={loss}", f"data.train={path}")
        assert f"{loss}.jsonl" in lines[2]
        assert [re.sub(r"^\w+.jsonl:\d+", "", line) for line in lines[2 : 2 + len(says)]] == says
        table = show(inputs, "rm", "--rows", "1", "--tokens", f"loss.name={loss}", f"data.train={path}")
        ends = [line.partition("'\\n'  ")[2] for line in table]
        assert [end for end in ends if end] == {"steps": ["label 1", "label 0"], "regression": ["score 0.25"]}.get(
            loss, []
        )


def test_pairs_and_prompts_have_their_sequences(inputs):
    lines = show(inputs, "dpo", "--rows", "1")
    assert {"pairs.jsonl:1: chosen: 15 tokens, 2 train", "pairs.jsonl:1: rejected: 16 tokens, 3 train"} <= set(lines)
    lines = show(inputs, "grpo", "--rows", "1", "--count", "data.columns={chosen: answer}")
    assert "pairs.jsonl:1: prompt: 12 tokens, a prompt" in lines and "train (" not in "".join(lines)
    assert any(re.match(r"all rows: 6 prompts of \d+ tokens, of which none trains", line) for line in lines)


def test_a_row_that_counts_otherwise_says_its_weight(inputs):
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "4", "margin": 0.5, "weight": 2.5}
    path = write_jsonl(inputs / "weighted.jsonl", [pair] * 8)
    for name, says in (("dpo", "15 tokens, 2 train, weight 2.5"), ("rm", "15 tokens, 1 train, margin 0.5, weight 2.5")):
        lines = show(inputs, name, "--rows", "1", f"data.train={path}")
        assert [line.partition("chosen: ")[2] for line in lines if "chosen: " in line] == [says]


def test_a_line_for_each_token_of_the_evaluation_rows(inputs):
    lines = show(inputs, "sft", "--eval", "--tokens", "--rows", "1")
    assert lines[2] == "eval.jsonl:1: 17 tokens, 4 train"
    table = [line.split() for line in lines[4:21]]
    assert [row[0] for row in table] == [str(i) for i in range(17)]
    assert [row[3] for row in table if row[2] == "1"] == ["'1'", "'0'", "'0'", "'<|im_end|>'"]


def test_what_cannot_be_shown_is_one_line(inputs):
    for name, words, says in (
        ("serve", (), "mrl: mrl data show: knows no rows of `mrl serve`; give the config of a command"),
        ("sft", ("data.train=none.jsonl",), 'mrl: data.train: value "none.jsonl" does not exist'),
        ("dpo", ("--eval",), "mrl: data.eval: is null; name the rows to evaluate on"),
        ("sft", ("data.max_length=3", "data.truncation=drop"), "mrl: data.train: train.jsonl: none of its 10 rows can"),
    ):
        done = CliRunner().invoke(cli.main, ["data", "show", str(inputs / f"{name}.yaml"), *words])
        line = done.stderr.replace(f"{inputs}/", "").replace("'none", '"none').replace("jsonl'", 'jsonl"')
        assert (done.exit_code, line.count("\n")) == (2, 1) and line.startswith(says), line


def test_weights_colours_and_what_a_terminal_would_take_for_a_command():
    tokenizer = make_tokenizer()
    texts = ["hello", "\x1b[2J", "dog\nfox", "lazy"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    weights = [weight for one, weight in zip(ids, (0.0, 1.0, 0.5, 1.0), strict=True) for _ in one]
    of = ShownSequence("", [token for one in ids for token in one], weights)
    assert list(text_lines(tokenizer, of, coloured=False)) == ["hello⟦\\x1b[2J⟧⟦0.5:dog⟧", "⟦0.5:fox⟧⟦lazy⟧"]
    coloured = list(text_lines(tokenizer, of, coloured=True))
    assert f"{TRAINS}\\x1b[2J\x1b[0m" in coloured[0] and f"{TRAINS}lazy\x1b[0m" in coloured[1]
    long = ShownSequence("", [ids[0][0]] * 1000, [0.0] + [1.0] * 999)
    assert "... 400 tokens, 400 of them train ..." in list(text_lines(tokenizer, long, coloured=False))


def test_colours_are_for_terminals_that_want_them(monkeypatch, inputs):
    given: list[bool] = []
    monkeypatch.setattr("mrl.launch.showing.run", lambda *_, coloured, **__: given.append(coloured))
    for terminal, no_colour in ((False, ""), (True, ""), (True, "1")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setenv("NO_COLOR", no_colour)
        record._show(config_path="x", overrides=(), rows=1, count=False, evaluation=False, tokens=False, of=None)
    assert given == [False, True, False], json.dumps(given)


def test_a_mixture_is_shown_in_its_order_with_the_share_of_each_source(inputs):
    sources = f"[{{path: {inputs}/train.jsonl, weight: 3}}, {{path: {inputs}/eval.jsonl, weight: 1}}]"
    lines = show(inputs, "sft", "--rows", "8", f"data.train={sources}", "train.steps=null")
    assert lines[0] == "data.train: train, eval: 17 rows"
    places = [
        line.split(":")[0] for line in lines if re.match(r"(train|eval): \w+.jsonl:\d+: \d+ tokens, \d train$", line)
    ]
    assert places == ["train", "eval", "train", "train"] * 2
    assert any(re.match(r"the first 17 rows that are used: 17 sequences", x) for x in lines)
    assert any(re.match(r"  train: 13 rows, 13 sequences, \d+ tokens, \d+ train \(.* %\)$", x) for x in lines)
    lines = show(inputs, "sft", "--rows", "0", "--count", f"data.train={sources}", "train.steps=null")
    assert [line.split(",")[0] for line in lines if re.match("  (train|eval): .*sequences", line)] == [
        "  train: 10 rows", "  eval: 7 rows",
    ]  # fmt: skip
    halves = sources.replace("weight: 3", "weight: 3, epochs: 0.5").replace("weight: 1", "weight: 1, epochs: 0.5")
    lines = show(inputs, "sft", "--rows", "0", f"data.train={halves}", "train.steps=null")
    assert any(line.startswith("the first 8 rows that are used: ") for line in lines), lines
    prompts = show(inputs, "grpo", "--rows", "4", "--count", f"data.train={sources}", "train.steps=null")
    assert [line.split(":")[0] for line in prompts if re.match(r"(train|eval): \w+.jsonl:", line)] == [*places[:4]]
    sets = f"data.eval={{one: {inputs}/eval.jsonl, two: {{path: {inputs}/train.jsonl, loss_on: all}}}}"
    lines = show(inputs, "sft", "--rows", "0", "--eval", sets)
    heads = [line for line in lines if line.startswith("data.eval")]
    assert heads == [
        f"data.eval.{n}: {f}.jsonl: {k} rows of the format messages"
        for n, f, k in (("one", "eval", 7), ("two", "train", 10))
    ]
