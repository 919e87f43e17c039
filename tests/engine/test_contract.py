"""Every engine through the contract (tests/engine/contract.py), in the layouts of tests/engine/layouts.py.

More of the contract: test_generation.py (sampling), test_offload.py (what is where), test_parity_*.py (against Hugging Face).
What needs no engine is tested apart: test_checkpoint.py (the folder), test_guards.py, test_microbatch.py, test_sampling.py,
test_logprobs.py, test_collective.py. What only one engine has: test_traps_megatron.py, test_router_losses.py,
test_optim_state.py and test_quantized.py (megatron).
"""

import os
import shutil

import pytest
from transformers import AutoModelForCausalLM

from mrl.config.schema import FSDPConfig, LoraConfig
from tests.engine.contract import PAD
from tests.engine.harness import run_case
from tests.engine.layouts import FEW, LAYOUTS, SPLIT, WHOLE, WIDE_LAYOUTS, world_and_role
from tests.tiers import in_tiers, nightly_but, slow_but

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
SERVED = ("models_take_turns", "an_update_takes_the_place_of_the_config", "several_labels_and_the_largest")
# cases in further layouts, on four layers of a dense model or of experts
MORE = (
    ("predictions_come_back_in_order", "llama", ("megatron tp2 pp2 dp2",)),
    ("gradients_accumulate_until_zeroed", "llama", ("megatron pp2 vpp2",)),  # trap 28
    ("micro_batches_do_not_matter", "llama", ("megatron dp2", "megatron tp2 cp2")),  # trap 5
    ("micro_batches_do_not_matter", "mixtral", ("megatron ep2",)),
    ("documents_do_not_see_each_other", "qwen3_5", ("fsdp", "megatron", "megatron cp2", "fsdp cp2")),  # trap 17
    ("documents_do_not_see_each_other", "qwen3_5_moe", ("megatron",)),
)
CASES = [(layout, case) for layout in LAYOUTS for case in EVERYWHERE + (ONCE if layout in SPLIT else ())]
FAST_CASES = [(layout, case) for layout, case in CASES if layout in FEW and (layout in FEW[:2] or case in EVERYWHERE)]
SLOW_CASES = [  # each layout in turn
    *((layout, EVERYWHERE[i % len(EVERYWHERE)]) for i, layout in enumerate(LAYOUTS) if layout not in FEW),
    ("fsdp cp2", "offloaded_state_gives_the_same_numbers"),
]
MORE_CASES = [(layout, case, family) for case, family, layouts in MORE for layout in layouts]
FAST_MORE = MORE_CASES[1:3]
SLOW_MORE = [one for one in MORE_CASES if one[0] in ("megatron ep2", "megatron cp2", "fsdp")]


def run(layout, case, folder, **kwargs):
    world_size, config = world_and_role(layout, folder, **kwargs.pop("role", {}))
    module = "served" if case in SERVED else "contract"
    return run_case(world_size, f"tests.engine.{module}:{case}", config=config, **kwargs)


@pytest.mark.parametrize(("layout", "case"), in_tiers(FAST_CASES, SLOW_CASES, CASES))
def test_contract(folder, layout, case):
    run(layout, case, folder("llama"))


@pytest.mark.parametrize(("layout", "case", "family"), in_tiers(FAST_MORE, SLOW_MORE, MORE_CASES))
def test_more_layouts(folder, layout, case, family):
    run(layout, case, folder(family, layers=4, long_memory=True))


OURS = [layout for layout in [*SPLIT, "megatron pp2 vpp2", "megatron cp2"] if not layout.startswith("external")]
AT_NIGHT = ["fsdp cp2", "megatron pp2", "megatron cp2", "megatron pp2 vpp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", nightly_but([one for one in OURS if one not in AT_NIGHT], OURS))
def test_what_a_server_asks(folder, layout):
    """What `mrl serve` needs beside; an engine of another package need not have it."""
    for case in SERVED:
        run(layout, case, folder("llama", layers=4, tied=True))


OF_ROLES = [(layout, role) for role in ("bf16", "lora") for layout in OURS]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "role"), nightly_but([("megatron tp2", "bf16"), ("fsdp dp2", "lora")], OF_ROLES))
def test_models_take_turns_under_more_keys(folder, layout, role):
    options = {
        "bf16": {"dtype": "bfloat16", "offload": ("optimizer",)},
        "lora": {"model": {"lora": LoraConfig(rank=4, alpha=8.0)}},
    }
    run(layout, "models_take_turns", folder("llama", layers=4, tied=True), role=options[role])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["guards_find_copies_that_differ", "schedule_and_clipping"])
def test_copies_of_the_weights(folder, case):
    """HSDP: the norm counts one copy, and copies are compared."""
    run("fsdp hsdp", case, folder("llama"))


@pytest.mark.parametrize("layout", slow_but(FEW, [*WHOLE, *SPLIT]))
def test_the_pad_token_trains(folder, layout):
    run(layout, "the_pad_token_trains_like_any_other", folder("qwen3", pad_token_id=PAD))


@pytest.mark.parametrize(
    "layout",
    in_tiers(["megatron ep2"], ["megatron pp2 vpp2"], [*WIDE_LAYOUTS, "fsdp cp2 dp2"]),
)
def test_experts_and_virtual_stages(folder, tmp_path, layout):
    """The cases that touch every weight, for layouts with experts or virtual stages. Trap 33: experts of all ranks are saved."""
    model = folder("qwen3_moe", layers=4)
    for case in EVERYWHERE:
        run(layout, case, model)
    run(layout, "resume_is_bitwise", model, path=str(tmp_path / "checkpoints"))
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))
    run(layout, "generates_as_hugging_face", model, model_folder=model)


RESUMED = [(layout, family) for family in ("qwen3", "qwen3_moe") for layout in LAYOUTS]
FAST_RESUMED = [(layout, "qwen3") for layout in FEW]
SLOW_RESUMED = [("megatron cp2", "qwen3_moe"), ("fsdp hsdp", "qwen3"), ("fsdp cp2", "qwen3_moe")]


@pytest.mark.parametrize(("layout", "family"), in_tiers(FAST_RESUMED, SLOW_RESUMED, RESUMED))
def test_resume_is_bitwise(folder, tmp_path, layout, family):
    run(layout, "resume_is_bitwise", folder(family), path=str(tmp_path))


@pytest.mark.parametrize("layout", in_tiers(["megatron tp2"], ["fsdp dp2"], SPLIT))
def test_resume_is_bitwise_in_bf16_with_recompute_and_offload(folder, tmp_path, layout):
    """An engine of another package need not recompute: what it lacks it refuses (test_registry.py)."""
    role = {"dtype": "bfloat16", "offload": ("optimizer",)}
    role |= {} if layout.startswith("external") else {"recompute": "full"}
    run(layout, "resume_is_bitwise", folder("llama", tied=True), path=str(tmp_path), role=role)


@pytest.mark.parametrize("layout", in_tiers([], ["fsdp cp2", "megatron tp2"], [*SPLIT, "megatron cp2"]))
def test_dropout(folder, tmp_path, layout):
    """Dropout is off in eval mode (trap 18), and a resumed run draws what the other would have drawn."""
    run(layout, "dropout_is_off_in_eval_mode", folder("llama", attention_dropout=0.5))
    run(layout, "resume_is_bitwise", folder("llama", attention_dropout=0.5), path=str(tmp_path))


OF_THEIR_OWN = [
    ("megatron ep2", "glm4_moe"), ("megatron tp2", "olmoe"), ("fsdp dp2", "ernie4_5_moe"),
    ("megatron tp2", "qwen3_5"), ("megatron tp2", "deepseek_v3"), ("fsdp dp2", "gemma2"), ("fsdp hsdp", "minimax_m2"), ("fsdp dp2", "olmoe"),
    ("external dp2", "olmoe"), ("fsdp hsdp", "deepseek_v3"), ("fsdp dp2", "qwen3_5_moe"), ("megatron cp2", "qwen3_5_moe"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "family"), in_tiers(OF_THEIR_OWN[:1], OF_THEIR_OWN[1:3], OF_THEIR_OWN))
def test_families_with_parts_of_their_own(folder, tmp_path, layout, family):
    """Resume and export where a model has what no other has: norms over split heads, a router bias that is no parameter, or
    a parameter that never trains."""
    model = folder(family)
    run(layout, "resume_is_bitwise", model, path=str(tmp_path / "checkpoints"))
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))
    run(layout, "guards_find_nothing_on_a_right_step", model)
    if layout.startswith("fsdp"):
        run(layout, "generates_as_hugging_face", model, model_folder=model)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "phi"])
def test_documents_of_models_without_a_table(folder, family):
    run("fsdp", "documents_do_not_see_each_other", folder(family))


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2"])
def test_random_numbers_go_on(folder, tmp_path, layout):
    """Looks at the fsdp engine's own generators; of every engine, a resume with dropout shows the same (test_dropout), and
    which ranks of the megatron engine draw alike is trap 29."""
    run(layout, "random_numbers_go_on", folder("llama"), path=str(tmp_path))


CHANGES = [
    ("fsdp cp2", "fsdp dp2"), ("megatron tp2", "megatron pp2"), ("external", "external dp2"), ("fsdp dp2", "fsdp hsdp"),
    ("fsdp hsdp", "fsdp"), ("fsdp dp4", "fsdp dp2"), ("fsdp", "fsdp cp2"), ("external dp2", "external"),
]  # fmt: skip


@pytest.mark.parametrize(("saved_by", "read_by"), in_tiers(CHANGES[:2], CHANGES[3:4], CHANGES))
def test_another_layout_goes_on(folder, tmp_path, saved_by, read_by):
    """Chains of more layouts, with runs of `mrl sft`, are in tests/resume/test_layouts.py."""
    remote = f"file://{tmp_path}/remote"
    expected = run(saved_by, "save_after", folder("mixtral"), path=str(tmp_path / "a"), remote=remote)
    run(read_by, "go_on", folder("mixtral"), path=str(tmp_path / "a"), expected=expected)
    options = {"path": str(tmp_path / "b"), "expected": expected, "remote": remote, "del_local_after_load": True}
    run(read_by, "go_on", folder("mixtral"), **options)
    assert not os.path.exists(tmp_path / "b" / "step_00000002")


@pytest.mark.parametrize(
    "replicate", [pytest.param(2, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.slow)]
)
def test_sequences_are_shared_whatever_is_copied(folder, tmp_path, replicate):
    """Ulysses beside HSDP: the ranks of a group hold shards of one copy, or a copy each; gradients are those of one rank."""
    role, path = {"fsdp": FSDPConfig(replicate=replicate)}, str(tmp_path)
    expected = run("fsdp", "save_after", folder("llama"), path=path)
    run("fsdp cp2 dp2", "go_on", folder("llama"), path=path, expected=expected, role=role)
    run("fsdp cp2 dp2", "guards_find_nothing_on_a_right_step", folder("llama"), role=role)
    run("fsdp cp2 dp2", "resume_is_bitwise", folder("llama"), path=str(tmp_path / "again"), role=role)


@pytest.mark.parametrize("layout", in_tiers(FEW[:2], ["external dp2"], SPLIT))
def test_wrong_checkpoints_are_refused_on_every_rank(folder, tmp_path, layout):
    path = str(tmp_path / "checkpoints")
    run(layout, "save_after", folder("llama"), path=path)
    step = f"{path}/step_00000002"
    refuse = {"case": "refuses_checkpoint", "layout": layout}
    run(**refuse, folder=folder("llama"), path=str(tmp_path / "none"), message="none: holds no whole checkpoint")
    run(**refuse, folder=folder("llama", layers=3), path=path, message="another model")
    run(**refuse, folder=folder("llama", rms_norm_eps=1e-3), path=path, message="another model: rms_norm_eps ")
    damaged = shutil.copytree(step, str(tmp_path / "damaged"))
    os.remove(max((os.path.join(d, f) for d, _, fs in os.walk(damaged) for f in fs), key=os.path.getsize))
    run(**refuse, folder=folder("llama"), path=damaged, message="is missing")
    os.remove(f"{step}/COMPLETE")
    run(**refuse, folder=folder("llama"), path=path, message="holds no whole checkpoint")


EXPORTED = [
    (layout, family)
    for layout in ("fsdp dp2", "megatron tp2 pp2", "fsdp", "external dp2")
    for family in ("llama tied", "mixtral", "qwen2", "qwen3_moe")
]
FAST_EXPORTED = [*EXPORTED[:2], *EXPORTED[4:6]]
SLOW_EXPORTED = [("fsdp", "qwen2"), ("external dp2", "qwen3_moe")]


@pytest.mark.parametrize(("layout", "family"), in_tiers(FAST_EXPORTED, SLOW_EXPORTED, EXPORTED))
def test_export_is_what_was_trained(folder, tmp_path, layout, family):
    model = folder("llama", tied=True) if family == "llama tied" else folder(family)
    run(layout, "export_is_what_was_trained", model, path=str(tmp_path / "hf"))


@pytest.mark.parametrize("layout", ["fsdp dp2", "fsdp cp2", "megatron", "megatron pp2", "external dp2"])
def test_value_head_export(folder, tmp_path, layout):
    path, model = str(tmp_path / "hf"), folder("qwen3", tied=True)
    run(layout, "value_head_export_is_a_sequence_classifier", model, path=path, role={"head": "value"})


GENERATED = [(layout, family) for family in ("llama", "mistral") for layout in LAYOUTS]
FAST_GENERATED = [(layout, "llama") for layout in FEW]
SLOW_GENERATED = [
    ("fsdp cp2", "mistral"),
    ("megatron cp2", "mistral"),
    ("megatron tp2 pp2", "llama"),
    ("fsdp hsdp", "llama"),
]


@pytest.mark.parametrize(("layout", "family"), in_tiers(FAST_GENERATED, SLOW_GENERATED, GENERATED))
def test_generates_as_hugging_face(folder, layout, family):
    run(layout, "generates_as_hugging_face", folder(family), model_folder=folder(family))


@pytest.mark.parametrize("layout", SPLIT)
def test_temperature_and_entropy(folder, layout):
    run(layout, "temperature_and_entropy", folder("qwen3"), model_folder=folder("qwen3"))


@pytest.mark.slow
def test_a_model_from_scratch_is_the_same_in_every_layout(folder):
    starts = [run(layout, "random_start", folder("qwen3_moe")) for layout in LAYOUTS]
    assert all(start == starts[0] for start in starts) and len(starts[0]) > 20
    others = [run(layout, "random_start", folder("granitemoe")) for layout in LAYOUTS if layout.startswith("fsdp")]
    assert all(start == others[0] for start in others) and len(others[0]) > 15


@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron", "external"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_read(folder, tmp_path, family, layout):
    """transformers can save the experts of a layer as one tensor (`save_original_format=False`): the same model."""
    AutoModelForCausalLM.from_pretrained(folder(family)).save_pretrained(tmp_path, save_original_format=False)
    run(layout, "weights_are_those_of", str(tmp_path), other=folder(family))
