"""A model whose chat template ends turns with another token than its EOS: what runs stop at, and what exports say."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from mrl.convert.exporting import export_adapter, export_hf
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import say_other_ends
from mrl.trainers.console import open_console
from tests.engine.harness import run_case
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies

END, EOS = "<|im_end|>", "<|endoftext|>"


def as_base(model, out):
    """A copy of a model's folder, whose EOS is not what its template ends turns with. Returns the ids of (EOS, that end)."""
    shutil.copytree(model, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    eos, end = tokenizer.convert_tokens_to_ids([EOS, END])
    tokenizer.eos_token = EOS
    tokenizer.save_pretrained(out)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(content | {"eos_token_id": eos}))
    return eos, end


def ends_of(folder):
    return GenerationConfig.from_pretrained(folder).eos_token_id


def sft(config):
    kind, message, said = run_case(1, "tests.trainers.cases:train", config=config)
    assert (kind, message) == ("done", "")
    return said


@pytest.mark.parametrize("lora", [None, {"rank": 2, "export": "adapter"}])
def test_exports_and_conversions_name_the_end_of_turns_beside_the_eos(inputs, tmp_path, lora):
    eos, end = as_base(inputs / "model", tmp_path / "model")
    config = tiny_runs.make_config(
        inputs, tmp_path / "run", model={"path": str(tmp_path / "model"), "lora": lora}, train={"steps": 1},
        optimizer={"warmup_steps": 0},
    )  # fmt: skip
    assert sft(config).count(f"the chat template ends a turn with '{END}' ({end}), no end token of the model's") == 1
    assert ends_of(tmp_path / "run/hf") == [eos, end]
    export_hf(tmp_path / "run", tmp_path / "exported")
    before, after = (json.loads((tmp_path / f / "generation_config.json").read_text()) for f in ("model", "exported"))
    before.pop("_from_model_config", None)
    assert after == before | {"eos_token_id": [eos, end]}
    if lora is not None:
        export_adapter(tmp_path / "run", tmp_path / "adapter")
        assert ends_of(tmp_path / "adapter") == [eos, end]


@pytest.mark.parametrize("named", ["generation_config.json", "nowhere"])
def test_nothing_is_added_where_the_model_names_the_end_or_rows_have_no_turns(inputs, tmp_path, named):
    eos, end = as_base(inputs / "model", tmp_path / "model")
    file, rows = tmp_path / "model/generation_config.json", tmp_path / "text.jsonl"
    rows.write_text('{"text": "1+1="}\n' * 4)
    data = {"train": str(rows)} if named == "nowhere" else {}
    if not data:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [end, eos]}))
    config = tiny_runs.make_config(
        inputs, tmp_path / "run", model={"path": str(tmp_path / "model")}, data=data, train={"steps": 1}, optimizer={"warmup_steps": 0},
    )  # fmt: skip
    assert "end tokens" not in sft(config)
    assert (tmp_path / "run/hf/generation_config.json").read_bytes() == file.read_bytes()


def test_a_policy_stops_at_the_end_of_its_turn(tmp_path):
    tiny_policies.make_inputs(tmp_path)
    eos, end = as_base(tmp_path / "model", tmp_path / "base")
    config = tiny_policies.make_config(
        tmp_path, tmp_path / "run", actor={"model": {"path": str(tmp_path / "base"), "dtype": "float32"}}, train={"steps": 2},
        rollout={"max_new_tokens": 16},
    )  # fmt: skip
    kind, message, *_ = run_case(1, "tests.trainers.rl.cases:train", config=config)
    assert kind == "done", message
    rows = [row for rows in tiny_policies.samples_of(tmp_path / "run").values() for row in rows]
    answers = [(row["finished"], row["tokens"][row["mask"].index(1) :]) for row in rows]
    ended = [(finished, tokens.index(end) + 1 - len(tokens)) for finished, tokens in answers if end in tokens]
    assert ended and set(ended) == {(True, 0)}
    assert ends_of(tmp_path / "run/hf") == [eos, end]


def test_a_model_that_names_no_end_keeps_what_transformers_takes_from_config_json(tmp_path):
    from mrl.weights.tokenizer_files import add_end_tokens

    for fields, own, ends in (
        ({"eos_token_id": 7}, [7], [7, 3]),
        ({"eos_token_id": [7, 8]}, [8], [7, 8, 3]),
        ({}, [1], [1, 3]),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4, "pad_token_id": 0, **fields}))
        add_end_tokens(tmp_path, tmp_path, own, [3])
        assert json.loads((tmp_path / "generation_config.json").read_text()) == {
            "pad_token_id": 0,
            "eos_token_id": ends,
        }
        (tmp_path / "generation_config.json").unlink()
    add_end_tokens(tmp_path, tmp_path, [1], [])
    assert not (tmp_path / "generation_config.json").exists()


def test_a_resume_says_what_ends_otherwise(capsys):
    console, same = open_console("plain", enabled=True), {"end_tokens": {"own": (1,), "added": [3]}}
    say_other_ends(console, same, EndTokens((1,), (3,)))
    assert capsys.readouterr().out == ""
    say_other_ends(console, {}, EndTokens((1,), (3,)))
    said = capsys.readouterr().out
    assert said == "changed since the checkpoint: end tokens of the chat template were none, now [3]\n"
    say_other_ends(console, same, EndTokens((1,), ()))
    assert "were [3], now none" in capsys.readouterr().out
