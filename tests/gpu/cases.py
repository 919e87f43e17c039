"""The cases: a function of measures.py and its arguments, or a command line of mrl."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.gpu.models import MODELS, OF_MEGATRON


@dataclasses.dataclass(frozen=True)
class Case:
    """arguments: of the function `run` of measures.py. needs_te: left out where transformer-engine is not installed."""

    name: str
    run: str
    arguments: dict[str, Any]

    @property
    def needs_te(self) -> bool:
        return self.arguments.get("layer_spec") == "te"


def numbers(family: str, label: str = "", **arguments: Any) -> Case:
    words = [arguments.get("backend", "megatron"), arguments.get("layer_spec", ""), arguments["dtype"], label]
    return Case(f"numbers {family} {' '.join(w for w in words if w)}", "numbers", {"family": family, **arguments})


DEFERRED = {"defer_sync": True}
FP32 = [
    *(numbers(family, dtype="float32", layer_spec="local") for family in OF_MEGATRON),
    *(numbers(family, dtype="float32", layer_spec="te") for family in OF_MEGATRON),
    *(numbers(family, dtype="float32", backend="fsdp") for family in MODELS),
]
BF16 = [
    *(numbers(family, dtype="bfloat16", layer_spec="local") for family in OF_MEGATRON),
    *(numbers(family, dtype="bfloat16", layer_spec="te") for family in OF_MEGATRON),
    *(numbers(family, dtype="bfloat16", backend="fsdp") for family in MODELS),
    numbers("qwen3", "compiled", dtype="bfloat16", backend="fsdp", keys={"compile": True}),
    *(
        numbers(family, "deferred", dtype="bfloat16", backend="fsdp", keys=DEFERRED)
        for family in ("qwen3", "qwen3_moe")
    ),
    *(
        numbers(family, "lora", dtype="bfloat16", layer_spec=spec, lora=True)
        for family in ("qwen3", "qwen3_moe")
        for spec in ("local", "te")
    ),
]
GROUPED = [
    # what `auto` is not: on under local, off under te
    *(
        numbers(family, "grouped" if on else "one by one", dtype="bfloat16", layer_spec=spec, moe={"grouped_mm": on})
        for spec, on in (("local", False), ("te", True)) for family in ("qwen3_moe", "deepseek_v3", "mixtral")
    ),
    Case("grouped products", "grouped_products", {"splits": (0, 1, 17, 0, 300, 64, 3, 0)}),
]  # fmt: skip
TE_BF16 = {"dtype": "bfloat16", "layer_spec": "te"}


def keys(family: str, **fields: Any) -> Case:
    return numbers(family, " ".join(f"{k}={v}" for k, v in fields.items()), **TE_BF16, megatron=fields)


FP8_AT_MOST = {"llama": 15.0, "qwen3": 15.0, "qwen3_moe": 5.0, "deepseek_v3": 5.0, "gpt_oss": 5.0}
"""Times the error of transformers in bfloat16: gradients of an H100 had 10, 9, 2.8, 3.2 and 2.3."""
FP8_LOG_PROBS_AT_MOST = 16.0
"""The same of log-probs: factors have 4 bits in FP8 (E4M3) and 8 in bfloat16, so that one is rounded 16 times as coarsely. DeepSeek-V3's had 6.4."""

KEYS = [
    keys("qwen3", apply_rope_fusion=False), keys("qwen3", gradient_accumulation_fusion=False),
    keys("qwen3_moe", moe_permute_fusion=False), keys("qwen3_moe", moe_router_fusion=True),
    keys("deepseek_v3", moe_router_fusion=True), keys("gpt_oss", moe_router_fusion=True),
    keys("qwen3", use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"),
    keys("qwen3", optimizer_cpu_offload=True), keys("qwen3_moe", optimizer_cpu_offload=True),
    *(
        numbers(
            family, f"fp8 {recipe}", **TE_BF16, at_most=FP8_AT_MOST[family], log_probs_at_most=FP8_LOG_PROBS_AT_MOST,
            megatron={"fp8": "hybrid", "fp8_recipe": recipe},
        )
        for recipe in ("tensorwise", "blockwise")
        for family in ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
    ),
]  # fmt: skip


def same(family: str, change: dict[str, Any], **options: Any) -> Case:
    words = " ".join(f"{k}={v}" for k, v in change.items())
    spec = options.get("layer_spec", options.get("backend"))
    return Case(
        f"same {family} {spec} {words}",
        "same_as_without",
        {"family": family, "dtype": "bfloat16", "change": change, **options},
    )


SAME = [
    *(
        same(family, change, layer_spec=spec)
        for spec in ("te", "local")
        for family in ("qwen3", "qwen3_moe", "deepseek_v3")
        for change in (
            {"recompute": "full"}, {"recompute": "selective"}, {"offload": ("activations",)},
            {"offload": ("parameters", "gradients", "optimizer")},
        )
    ),
    same("qwen3", {"recompute": "full"}, backend="fsdp"), same("qwen3", {"offload": ("activations",)}, backend="fsdp"),
]  # fmt: skip


def of_engine(name: str, family: str, dtype: str = "float32", *arguments: str, **options: Any) -> Case:
    words = " ".join(f"{k}={v}" for k, v in options.items())
    return Case(
        f"{name} {family} {dtype} {words}",
        "case",
        {"name": name, "family": family, "dtype": dtype, "arguments": arguments, **options},
    )


CONTRACT = [
    "micro_batches_do_not_matter", "gradients_accumulate_until_zeroed", "the_pad_token_trains_like_any_other",
    "predictions_come_back_in_order", "documents_do_not_see_each_other", "hooks_own_their_micro_batch",
    "schedule_and_clipping", "a_step_that_is_not_finite_changes_nothing",
    "guards_find_nothing_on_a_right_step", "guards_find_a_step_that_was_not_made", "bf16_keeps_fp32_masters",
    "offloaded_state_gives_the_same_numbers",
]  # fmt: skip
ENGINES = [{"layer_spec": "local"}, {"backend": "fsdp"}]
OF_ENGINE = [
    *(of_engine(name, "qwen3_moe", **engine) for name in CONTRACT for engine in ENGINES),
    *(of_engine(name, "qwen3_moe", "float32", "path", **engine) for name in ("resume_is_bitwise", "export_is_what_was_trained") for engine in ENGINES),
    of_engine("random_numbers_go_on", "qwen3_moe", "float32", "path", backend="fsdp"),
    of_engine("resume_is_bitwise", "qwen3", "bfloat16", "path", layer_spec="te", sizes={"hidden_size": 128, "head_dim": 32}),
]  # fmt: skip
DECODED = [
    # under te those in fp32 fail by TF32, and pass with NVIDIA_TF32_OVERRIDE=0 (fixed_shapes of experts was not run with it)
    *(
        of_engine(name, family, "float32", *more, layer_spec=spec)
        for spec in ("local", "te")
        for family in ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
        for name, more in (("samples_as_hugging_face", ("expected",)), ("same_in_any_company", ()), ("the_cache_is_bounded", ()))
        if (name, family) != ("the_cache_is_bounded", "deepseek_v3")  # whose cache is latent, and has no keys to count
    ),
    *(of_engine("fixed_shapes_give_the_same", family, layer_spec=spec) for spec in ("local", "te") for family in ("qwen3", "qwen3_moe", "deepseek_v3")),
    *(of_engine("company_changes_no_bit", family, dtype, layer_spec=spec, batch_invariant=True, size=1) for spec, dtype in (("local", "float32"), ("local", "bfloat16"), ("te", "bfloat16")) for family in ("qwen3", "qwen3_moe")),
    of_engine("company_changes_bits", "qwen3", "bfloat16", layer_spec="local"),
    of_engine("samples_as_hugging_face", "qwen3", "float32", "expected", backend="fsdp"),
    *(
        Case(f"decoding {family} {spec} {dtype}{' graphs' if graphs else ''}", "decoding_waits", {"family": family, "dtype": dtype, "layer_spec": spec, "cuda_graphs": graphs})
        for family in ("qwen3", "qwen3_moe", "deepseek_v3") for spec, dtype in (("te", "bfloat16"), ("local", "bfloat16"), ("local", "float32")) for graphs in (False, True)
    ),
]  # fmt: skip
WAITS = [
    Case(f"waits {family} {spec}", "waits", {"family": family, "dtype": "bfloat16", "layer_spec": spec})
    for family in ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "mistral")
    for spec in ("te", "local")
]
SPLIT = [
    ("tp2", 2, {"tp": 2}), ("tp2 without sp", 2, {"tp": 2, "sp": False}), ("pp2", 2, {"pp": 2}), ("pp2 vpp2", 2, {"pp": 2, "vpp": 2}),
    ("cp2", 2, {"cp": 2}), ("dp2", 2, {}), ("tp2 pp2", 4, {"tp": 2, "pp": 2}), ("tp2 dp2", 4, {"tp": 2}),
]  # fmt: skip
SPLIT_EXPERTS = [
    ("ep2", 2, {"ep": 2}), ("tp2 ep2", 2, {"tp": 2, "ep": 2}), ("pp2 ep2", 4, {"pp": 2, "ep": 2}), ("tp2 etp1 ep2 dp2", 4, {"tp": 2, "ep": 2}),
]  # fmt: skip


def split(layout: tuple[str, int, dict[str, Any]], family: str, **options: Any) -> Case:
    name, ranks, parallel = layout
    return numbers(family, f"{name}, {ranks} ranks", ranks=ranks, parallel=parallel, **options)


LOCAL_FP32 = {"dtype": "float32", "layer_spec": "local"}
OF_RANKS = [
    *(Case(f"link {way}, 2 ranks", "link", {"way": way, "ranks": 2}) for way in ("broadcast", "ipc")),
    *(
        Case(f"overlapped {family} {name}, {ranks} ranks", "overlapped", {"family": family, "dtype": "float32", "layer_spec": "local", "ranks": ranks, "parallel": parallel})
        for family, (name, ranks, parallel) in (("qwen3", SPLIT[5]), ("qwen3", ("pp2 dp2", 4, {"pp": 2})), ("deepseek_v3", SPLIT_EXPERTS[0]))
    ),
    *(split(layout, "qwen3", **kind) for layout in SPLIT for kind in (LOCAL_FP32, TE_BF16)),
    *(split(layout, "qwen3_moe", **kind) for layout in SPLIT_EXPERTS for kind in (LOCAL_FP32, TE_BF16)),
    *(split(layout, "deepseek_v3", **TE_BF16) for layout in (SPLIT[0], SPLIT[2], SPLIT[4], SPLIT_EXPERTS[0])),
    *(split(layout, "gpt_oss", **kind) for layout in (SPLIT[4], SPLIT_EXPERTS[0]) for kind in (LOCAL_FP32, TE_BF16)),
    split(SPLIT[4], "mistral", **TE_BF16),
    *(split(("dp2", 2, {}), family, dtype="float32", backend="fsdp") for family in ("qwen3", "qwen3_moe")),
    split(("dp2 deferred", 2, {}), "qwen3", dtype="float32", backend="fsdp", keys=DEFERRED),
    split(("tp2 userbuffers", 2, {"tp": 2}), "qwen3", **TE_BF16, megatron={"tp_comm_overlap": True}),
    split(("cp2", 2, {"cp": 2}), "qwen3", dtype="float32", backend="fsdp"),
    *(
        of_engine(name, "qwen3", "float32", *more, ranks=2, layer_spec="local", parallel=parallel)
        for name, more in (("resume_is_bitwise", ("path",)), ("export_is_what_was_trained", ("path",)), ("samples_as_hugging_face", ("expected",)), ("guards_find_nothing_on_a_right_step", ()), ("offloaded_state_gives_the_same_numbers", ()))
        for parallel in ({"tp": 2}, {"pp": 2}, {})
    ),
    of_engine("samples_as_hugging_face", "qwen3_moe", "float32", "expected", ranks=2, layer_spec="local", parallel={"ep": 2}),
    of_engine("resume_is_bitwise", "qwen3", "float32", "path", ranks=2, backend="fsdp"),
]  # fmt: skip
GRAPHS = [
    *(Case(f"training graphs {family} {spec}", "training_graphs", {"family": family, "dtype": "bfloat16", "layer_spec": spec}) for family, spec in (("qwen3", "local"), ("qwen3", "te"), ("mistral", "local"), ("qwen3_moe", "local"))),
    Case("training graphs qwen3 te tp2, 2 ranks", "training_graphs", {"family": "qwen3", "dtype": "bfloat16", "layer_spec": "te", "ranks": 2, "parallel": {"tp": 2}}),
]  # fmt: skip
CASES = [*BF16, *GROUPED, *KEYS, *WAITS, *GRAPHS, *DECODED, *SAME, *OF_ENGINE, *FP32, *OF_RANKS]
assert len({case.name for case in CASES}) == len(CASES)
