"""Runs that start from an import, and the export of what they leave: of `mrl sft`, and each role of `mrl ppo`."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from mrl.config.load import load_config
from mrl.config.ppo import PPOConfig
from mrl.config.schema import SFTConfig
from mrl.convert import sources
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.errors import CheckpointError
from tests.convert import hf_folders
from tests.convert.cases import load_folder
from tests.convert.test_refused import run as mrl_convert
from tests.engine.harness import run_case
from tests.tiers import in_tiers
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies


def train(command: str, path: str) -> None:
    """A case: one run of a trainer."""
    import importlib

    root = SFTConfig if command == "sft" else PPOConfig
    importlib.import_module(f"mrl.trainers.{command}").run(load_config(path, (), root))


@pytest.mark.parametrize(("size", "backend"), in_tiers([], [(2, "megatron")], [(2, "megatron"), (1, "fsdp")]))
def test_sft_from_an_import(tmp_path, size, backend):
    tiny_runs.make_inputs(tmp_path)
    import_hf(tmp_path / "model", tmp_path / "mcore")
    engine = {"backend": backend, "device": "cpu", "parallel": {"tp": size}}
    for start in ("model", "mcore"):
        config = tiny_runs.make_config(
            tmp_path, tmp_path / f"from-{start}", engine=engine, train={"steps": 2},
            model={"path": str(tmp_path / start), "dtype": "bfloat16"},
        )  # fmt: skip
        path = tiny_runs.write_config(tmp_path / f"{start}.yaml", config)
        run_case(size, "tests.convert.test_runs:train", command="sft", path=str(path))
        export_hf(tmp_path / f"from-{start}", tmp_path / f"hf-{start}")
        assert hf_folders.differences(tmp_path / f"from-{start}/hf", tmp_path / f"hf-{start}") == []
    for other in ("hf-mcore", "from-mcore/hf"):
        assert hf_folders.differences(tmp_path / "hf-model", tmp_path / other) == []
    before, after = hf_folders.files_of(tmp_path / "from-model/hf"), hf_folders.files_of(tmp_path / "hf-mcore")
    assert before.keys() == after.keys()
    assert [n for n in before if before[n] != after[n] and not n.endswith(".safetensors")] == []
    refuses_another_tokenizer(tmp_path, "from-model", None)


def refuses_another_tokenizer(folder: pathlib.Path, run: str, role: str | None) -> None:
    """The tokenizer of the model's folder is another one now; `--model` takes it, and an export says so."""
    settings = folder / "model/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"add_prefix_space": True}))
    given = ["--role", role] if role is not None else []
    code, said = mrl_convert("export", folder / run, folder / "changed", *given)
    assert code == 2 and f"{folder / 'model'}: the tokenizer or chat template there is not the one" in said
    done = export_hf(folder / run, folder / "changed", role=role, model=str(folder / "model"))
    [note] = done.notes
    assert note.startswith(f"tokenizer and chat template: those of {folder / 'model'}, which are not those")
    (folder / "model/config.json").write_text('{"model_type"')
    code, said = mrl_convert("export", folder / run, folder / "broken", *given)
    assert code == 2 and said.count("\n") == 1 and "config.json: not readable as JSON" in said, said


def test_each_role_of_a_ppo_run(tmp_path):
    tiny_policies.make_inputs(tmp_path)
    roles = {"actor": {"engine": tiny_policies.engine("megatron")}, "critic": {"engine": tiny_policies.engine("fsdp")}}
    config = tiny_policies.make_config(tmp_path, tmp_path / "run", "ppo", **roles)
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(config))
    run_case(1, "tests.convert.test_runs:train", command="ppo", path=str(tmp_path / "ppo.yaml"))
    export_hf(tmp_path / "run", tmp_path / "actor")
    assert hf_folders.differences(tmp_path / "run/hf", tmp_path / "actor") == []
    export_hf(tmp_path / "run", tmp_path / "critic", role="critic")
    critic = load_folder(str(tmp_path / "critic"))
    assert critic["score.weight"].shape == (1, 32) and "lm_head.weight" not in critic
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(loaded.score.weight, critic["score.weight"])
    with pytest.raises(CheckpointError, match="--role: value 'judge' is not in"):
        export_hf(tmp_path / "run", tmp_path / "none", role="judge")
    code, said = mrl_convert("verify", tmp_path / "run", tmp_path / "critic", "--role", "critic")
    assert code == 0, said
    refuses_another_tokenizer(tmp_path, "run", "actor")


def test_resume_says_that_an_import_has_no_optimizer(tmp_path):
    tiny_runs.make_inputs(tmp_path)
    import_hf(tmp_path / "model", tmp_path / "mcore")
    config = tiny_runs.make_config(
        tmp_path, tmp_path / "run", engine={"backend": "megatron", "device": "cpu"},
        checkpoint={"resume": str(tmp_path / "mcore")},
    )  # fmt: skip
    path = tiny_runs.write_config(tmp_path / "sft.yaml", config)
    with pytest.raises(AssertionError, match="holds weights alone, .*; name it in model.path"):
        run_case(1, "tests.convert.test_runs:train", command="sft", path=str(path))


def test_the_tokenizer_of_a_role_is_compared_with_its_own(tmp_path):
    torch.save({"state": {"models": {"actor": "a", "critic": "c"}}}, tmp_path / "trainer.pt")
    assert [sources._state(tmp_path, {}, role)["model"] for role in ("actor", "critic", "reward")] == ["a", "c", None]
    assert sources._state(tmp_path, {"state": {"model": "lone"}}, None) == {"model": "lone"}
