"""Which keys may differ between a checkpoint's config and the run that resumes it."""

from __future__ import annotations

import pytest

from mrl.config.keys import walk
from mrl.config.load import from_dict, to_dict
from mrl.config.resume import ABSENT, MAY_CHANGE, MOVED, changed_keys, check_resume
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError
from tests.config.test_load import base


def plain(**sections: object) -> dict:
    return to_dict(from_dict(base(**sections)))


def test_nothing_changed():
    assert changed_keys(plain(), plain()) == {}
    assert check_resume(plain(), plain()) == []


def test_changed_keys_are_dotted_and_a_value_that_is_a_mapping_is_one_key():
    old, new = plain(), plain(data={"columns": {"q": "prompt"}}, engine={"parallel": {"tp": 2}})
    assert changed_keys(old, new) == {"engine.parallel.tp": (1, 2), "data.columns": ({}, {"q": "prompt"})}
    assert changed_keys({"a": {"b": 1}}, {"a": {}, "c": 2}) == {"a.b": (1, ABSENT), "c": (ABSENT, 2)}


def test_layout_output_and_length_may_change():
    new = plain(
        output_dir="elsewhere", engine={"parallel": {"tp": 2}, "micro_batch": {"size": 1}, "offload": ["optimizer"]},
        log={"console": "plain"}, checkpoint={"every": 5}, train={"steps": 20},
        data={"eval": "rows", "train": "moved"}, model={"path": "moved"},
    )  # fmt: skip
    notes = check_resume(plain(train={"steps": 10}), new)
    assert len(notes) == 10
    assert 'output_dir: "run" at the save, "elsewhere" now' in notes
    assert "train.steps: 10 at the save, 20 now (the learning-rate schedule follows the new length)" in notes


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"dtype": "float32"}}, "model.dtype"),
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr"),
        ({"data": {"split": "other"}}, "data.split"),
        ({"data": {"max_length": 100}}, "data.max_length"),
        ({"train": {"global_batch_size": 9}}, "train.global_batch_size"),
        ({"seed": 1}, "seed"),
        ({"engine": {"backend": "fsdp"}}, "engine.backend"),
        ({"engine": {"moe": {"aux_loss": 0.1}}}, "engine.moe.aux_loss"),
    ],
)
def test_what_breaks_the_run_is_refused(sections, key):
    with pytest.raises(
        ConfigError, match=f"^{key}: value .* is not the .* that the checkpoint was saved with"
    ) as error:
        check_resume(plain(), plain(**sections))
    assert "\n" not in str(error.value)
    assert "with another output_dir" in str(error.value) and "never" not in str(error.value)


def test_every_breaking_key_is_named():
    with pytest.raises(ConfigError, match="seed: value 1 .*; optimizer.lr was 1e-05 and is 1.0; "):
        check_resume(plain(), plain(seed=1, optimizer={"lr": 1.0}))


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default():
    old = plain()
    del old["data"]["truncation"]
    assert check_resume(old, plain()) == []
    with pytest.raises(ConfigError, match="data.truncation"):
        check_resume(old, plain(data={"truncation": "drop"}))


def test_the_table_names_real_keys():
    paths = [key.path for key in walk(SFTConfig)]
    assert set(MOVED) < set(MAY_CHANGE)
    for allowed in MAY_CHANGE:
        assert any(path == allowed or path.startswith(allowed + ".") for path in paths), allowed
