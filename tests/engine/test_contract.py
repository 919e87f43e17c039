"""Both engines through the contract (tests/engine/contract.py), in the layouts named here."""

import dataclasses
import os
import shutil

import pytest
from transformers import AutoModelForCausalLM

from mrl.config.schema import FSDPConfig, ParallelConfig
from mrl.errors import ConfigError
from tests.engine import tiny
from tests.engine.contract import PAD
from tests.engine.harness import run_case

# name -> (world size, backend, degrees); `replicate` is engine.fsdp's
LAYOUTS = {
    "fsdp": (1, "fsdp", {}),
    "fsdp dp2": (2, "fsdp", {}),
    "fsdp dp4": (4, "fsdp", {}),
    "fsdp cp2": (2, "fsdp", {"cp": 2}),
    "fsdp hsdp": (4, "fsdp", {"replicate": 2}),
    "megatron": (1, "megatron", {}),
    "megatron tp2": (2, "megatron", {"tp": 2}),
    "megatron pp2": (2, "megatron", {"pp": 2}),
    "megatron cp2": (2, "megatron", {"cp": 2}),
    "megatron dp2": (2, "megatron", {}),
    "megatron tp2 pp2": (4, "megatron", {"tp": 2, "pp": 2}),
}
FSDP = [name for name in LAYOUTS if name.startswith("fsdp")]

EVERYWHERE = (
    "predictions_come_back_in_order",
    "gradients_accumulate_until_zeroed",
    "a_step_that_is_not_finite_changes_nothing",
)
ONCE = (
    "micro_batches_do_not_matter",
    "documents_do_not_see_each_other",
    "hooks_own_their_micro_batch",
    "schedule_and_clipping",
    "guards_find_nothing_on_a_right_step",
    "guards_find_a_step_that_was_not_made",
    "offloaded_state_gives_the_same_numbers",
    "bf16_keeps_fp32_masters",
)
# layouts that need experts, or more layers than the other cases have: qwen3_moe of 4 layers
WIDE_LAYOUTS = {
    "megatron ep2": (2, "megatron", {"ep": 2}),
    "megatron pp2 vpp2": (2, "megatron", {"pp": 2, "vpp": 2}),
    "megatron tp2 etp1": (2, "megatron", {"tp": 2, "etp": 1}),
    "megatron dp2 etp2": (2, "megatron", {"etp": 2}),
    "megatron tp2 ep2 etp2": (4, "megatron", {"tp": 2, "ep": 2, "etp": 2}),
}
SLOW_LAYOUTS = {"fsdp cp2 dp2": (4, "fsdp", {"cp": 2})}
ONCE_LAYOUTS = ("fsdp dp2", "megatron tp2", "megatron pp2")
OF_SHARED_SEQUENCES = ("micro_batches_do_not_matter", "documents_do_not_see_each_other", "hooks_own_their_micro_batch",
                       "guards_find_nothing_on_a_right_step", "bf16_keeps_fp32_masters")  # fmt: skip
CASES = [(layout, case) for layout in LAYOUTS for case in EVERYWHERE + (ONCE if layout in ONCE_LAYOUTS else ())]
CASES += [("fsdp cp2", case) for case in OF_SHARED_SEQUENCES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a model, by family; each is made once."""
    made = {}

    def of(family="llama", **fields):
        key = (family, *sorted(fields.items()))
        if key not in made:
            made[key] = tiny.make_model(str(tmp_path_factory.mktemp(family)), family, **fields)
        return made[key]

    return of


def run(layout, case, folder, **kwargs):
    world_size, backend, parallel = (LAYOUTS | WIDE_LAYOUTS | SLOW_LAYOUTS)[layout]
    options = kwargs.pop("role", {})
    if replicate := parallel.get("replicate"):
        parallel, options = {}, options | {"fsdp": FSDPConfig(replicate=replicate)}
    config = tiny.role(folder, backend=backend, parallel=parallel, **options)
    return run_case(world_size, f"tests.engine.contract:{case}", config=config, **kwargs)


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_contract(folder, layout, case):
    run(layout, case, folder("llama"))


@pytest.mark.parametrize("layout", ["fsdp", "fsdp dp2", "megatron", "megatron tp2"])
def test_the_pad_token_trains(folder, layout):
    run(layout, "the_pad_token_trains_like_any_other", folder("qwen3", pad_token_id=PAD))


@pytest.mark.parametrize(
    "layout", [*WIDE_LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)
def test_experts_and_virtual_stages(folder, tmp_path, layout):
    """The cases that touch every weight, for layouts with experts or virtual stages. Trap 33: experts of all ranks are saved."""
    model = folder("qwen3_moe", layers=4)
    for case in EVERYWHERE:
        run(layout, case, model)
    run(layout, "resume_is_bitwise", model, path=str(tmp_path / "checkpoints"))
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))
    run(layout, "generates_as_hugging_face", model, model_folder=model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_resume_is_bitwise(folder, tmp_path, layout, family):
    run(layout, "resume_is_bitwise", folder(family), path=str(tmp_path))


@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron tp2", "megatron pp2"])
def test_resume_is_bitwise_in_bf16_with_recompute_and_offload(folder, tmp_path, layout):
    role = {"dtype": "bfloat16", "recompute": "full", "offload": ("optimizer",)}
    run(layout, "resume_is_bitwise", folder("llama", tied=True), path=str(tmp_path), role=role)


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2", "megatron tp2", "megatron pp2"])
def test_dropout(folder, tmp_path, layout):
    """Dropout is off in eval mode (trap 18), and a resumed run draws what the other would have drawn."""
    run(layout, "dropout_is_off_in_eval_mode", folder("llama", attention_dropout=0.5))
    run(layout, "resume_is_bitwise", folder("llama", attention_dropout=0.5), path=str(tmp_path))


@pytest.mark.parametrize(
    ("layout", "family"), [("megatron tp2", "olmoe"), ("megatron ep2", "glm4_moe"), ("megatron tp2", "deepseek_v3")]
)
def test_families_with_parts_of_their_own(folder, tmp_path, layout, family):
    """Resume and export where a model has what no other has: norms over split heads, a router bias that is no parameter."""
    model = folder(family)
    run(layout, "resume_is_bitwise", model, path=str(tmp_path / "checkpoints"))
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))
    run(layout, "guards_find_nothing_on_a_right_step", model)


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2"])
def test_random_numbers_go_on(folder, tmp_path, layout):
    run(layout, "random_numbers_go_on", folder("llama"), path=str(tmp_path))


@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [
        ("fsdp dp2", "fsdp hsdp"),
        ("fsdp hsdp", "fsdp"),
        ("fsdp", "fsdp cp2"),
        ("fsdp cp2", "fsdp dp2"),
        ("fsdp dp4", "fsdp dp2"),
    ],
)
def test_another_layout_goes_on(folder, tmp_path, saved_by, read_by):
    remote = f"file://{tmp_path}/remote"
    expected = run(saved_by, "save_after", folder("mixtral"), path=str(tmp_path / "a"), remote=remote)
    run(read_by, "go_on", folder("mixtral"), path=str(tmp_path / "a"), expected=expected)
    options = {"path": str(tmp_path / "b"), "expected": expected, "remote": remote, "del_local_after_load": True}
    run(read_by, "go_on", folder("mixtral"), **options)
    assert not os.path.exists(tmp_path / "b" / "step_00000002")


@pytest.mark.parametrize("replicate", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_sequences_are_shared_whatever_is_copied(folder, tmp_path, replicate):
    """Ulysses beside HSDP: the ranks of a group hold shards of one copy, or a copy each; gradients are those of one rank."""
    role, path = {"fsdp": FSDPConfig(replicate=replicate)}, str(tmp_path)
    expected = run("fsdp", "save_after", folder("llama"), path=path)
    run("fsdp cp2 dp2", "go_on", folder("llama"), path=path, expected=expected, role=role)
    run("fsdp cp2 dp2", "guards_find_nothing_on_a_right_step", folder("llama"), role=role)
    run("fsdp cp2 dp2", "resume_is_bitwise", folder("llama"), path=str(tmp_path / "again"), role=role)


@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron tp2", "megatron pp2"])
def test_wrong_checkpoints_are_refused_on_every_rank(folder, tmp_path, layout):
    path = str(tmp_path / "checkpoints")
    run(layout, "save_after", folder("llama"), path=path)
    step = f"{path}/step_00000002"
    refuse = {"case": "refuses_checkpoint", "layout": layout}
    run(**refuse, folder=folder("llama"), path=str(tmp_path / "none"), message="none: holds no whole checkpoint")
    run(**refuse, folder=folder("llama", layers=3), path=path, message="is of another model")
    run(**refuse, folder=folder("llama", intermediate_size=40), path=path, message="is of another model")
    run(**refuse, folder=folder("llama", rms_norm_eps=1e-3), path=path, message="another model: rms_norm_eps ")
    damaged = shutil.copytree(step, str(tmp_path / "damaged"))
    os.remove(max((os.path.join(d, f) for d, _, fs in os.walk(damaged) for f in fs), key=os.path.getsize))
    run(**refuse, folder=folder("llama"), path=damaged, message="is missing")
    os.remove(f"{step}/COMPLETE")
    run(**refuse, folder=folder("llama"), path=path, message="holds no whole checkpoint")


@pytest.mark.parametrize("layout", ["fsdp", "fsdp dp2", "megatron tp2 pp2"])
@pytest.mark.parametrize("family", ["llama tied", "qwen2", "qwen3_moe", "mixtral"])
def test_export_is_what_was_trained(folder, tmp_path, layout, family):
    model = folder("llama", tied=True) if family == "llama tied" else folder(family)
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2", "megatron", "megatron pp2"])
def test_value_head_export(folder, tmp_path, layout):
    path, model = str(tmp_path / "hf"), folder("qwen3", tied=True)
    run(layout, "value_head_export_is_a_sequence_classifier", model, path=path, role={"head": "value"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generates_as_hugging_face(folder, layout, family):
    run(layout, "generates_as_hugging_face", folder(family), model_folder=folder(family))


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2", "megatron tp2", "megatron pp2"])
def test_temperature_and_entropy(folder, layout):
    run(layout, "temperature_and_entropy", folder("qwen3"), model_folder=folder("qwen3"))


def test_a_model_from_scratch_is_the_same_in_every_layout(folder):
    starts = [run(layout, "random_start", folder("qwen3_moe")) for layout in LAYOUTS]
    assert all(start == starts[0] for start in starts) and len(starts[0]) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "engine.parallel.tp: value 2 is not supported by backend fsdp"),
        ({"recompute": "selective"}, 'engine.recompute: value "selective" is not supported by backend fsdp'),
        ({"device": "cuda"}, 'engine.device: value "cuda" needs a GPU'),
        ({"parallel": ParallelConfig(etp=2)}, "engine.parallel.etp: value 2 is not supported by backend fsdp"),
        ({"parallel": ParallelConfig(cp=2)}, r"engine.parallel: tp\*pp\*cp .* does not divide the 1 processes"),
    ],
)
def test_fsdp_refuses_what_it_cannot_do(folder, change, message):
    from mrl.engine.fsdp.engine import FSDPEngine

    config = tiny.role(folder("llama"))
    with pytest.raises(ConfigError, match=message):
        FSDPEngine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, **change)))


@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_read(folder, tmp_path, family, layout):
    """transformers can save the experts of a layer as one tensor (`save_original_format=False`): the same model."""
    AutoModelForCausalLM.from_pretrained(folder(family)).save_pretrained(tmp_path, save_original_format=False)
    run(layout, "weights_are_those_of", str(tmp_path), other=folder(family))
