"""Every config key of `mrl sft` reaches what it configures: one row or more for each, of runs of the whole trainer.

A row names values of its key and what is seen of a run with each: of its files, metrics and messages, of the batches
it trains on, of the calls of its layers, or of the weights it exports, against AdamW and gradients of Hugging Face's
model. That a config object holds a value is never looked at. A new key fails `test_every_key_has_a_row` until it has a
row, and a new choice of a key `test_every_choice_is_made`.

Not seen here, for want of a GPU: that `engine.device: cpu` keeps a run off a GPU, and that the fsdp engine's
parameters and optimizer state leave it. Elsewhere: that bfloat16 reduces gradients in fp32 (trap 30), hub ids, and the
keys of IN_OTHER_TESTS, whose numbers a test of their own has.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

import pytest
import torch

from mrl.config.keys import walk_keys
from mrl.config.schema import SFTConfig
from tests.config import inputs, looks
from tests.config.reach import DEFAULT, Refusal, Row, Runs, of_section

MEGATRON, FSDP = ("megatron",), ("fsdp",)
HERE = "cuda" if torch.cuda.is_available() else "cpu"

# Keys that rows share.
SECOND = {"train.steps": 2}
HARDLY = {"optimizer.lr": 1e-30}  # what is exported or evaluated is the model that the run began with
SUMS, SIX, HUNDREDS = ({"data.train": f"{{inputs}}/{name}.jsonl"} for name in ("sums", "six", "hundreds"))
IN_ORDER = {"data.shuffle": False}
UNEVEN = {"data.train": "{inputs}/uneven.jsonl", "data.max_length": 20} | IN_ORDER
DENSE, OTHER, MOE, DROPOUT = ({"model.path": f"{{inputs}}/{name}"} for name in ("dense", "other", "experts", "dropout"))
RANDOM = {"model.init": "random"}
IN_TWOS = SIX | {"train.global_batch_size": 2}
EVEN = {"data.train": "{inputs}/even.jsonl", "data.max_length": 20}
EVAL = {"data.eval": "{inputs}/six.jsonl"}
WANDB = {"log.wandb.project": "mine"}

# A linear schedule and eps make what AdamW does known to a few digits (see tests/engine/parity.py).
ADAMW = {"optimizer.schedule": "linear", "optimizer.eps": 1e-6, "train.steps": 3}
MUON = ADAMW | {"optimizer.name": "muon", "optimizer.lr": 0.1}
CURVE = {"optimizer.schedule": "linear", "train.steps": 4}


def rates(*of_peak: float) -> Any:
    """What train/lr is, as parts of the 1e-2 of all runs here."""
    return pytest.approx([1e-2 * part for part in of_peak], rel=1e-9)


lr = looks.metric("train/lr")
steps = looks.metric("step")
order_of_seed_0 = looks.the_same_as_with(looks.rows, seed=0)
loss_of_seed_0 = looks.the_same_as_with(looks.metric("train/loss"), seed=0)


def on_one_backend(*rows: Row) -> list[Row]:
    """Rows of keys that no engine knows of."""
    return [dataclasses.replace(row, on=MEGATRON) for row in rows]


def on_two_ranks(*rows: Row) -> list[Row]:
    return [dataclasses.replace(row, on=MEGATRON, world=2) for row in rows]


RUN = [
    *on_one_backend(
        Row("output_dir", looks.places, [("{run}/here", ["here"]), ("{run}/there", ["there"])]),
        Row("seed", order_of_seed_0, [(DEFAULT, True), (1, False)], SIX, what="order"),
    ),
    Row("seed", loss_of_seed_0, [(DEFAULT, True), (1, False)], IN_ORDER | RANDOM, what="initialisation"),
    Row("seed", loss_of_seed_0, [(DEFAULT, True), (1, False)], IN_ORDER | DROPOUT, what="dropout"),
]  # fmt: skip

MODEL = [
    Row("model.path", looks.exported_model, [(DENSE["model.path"], "dense"), (OTHER["model.path"], "other")], HARDLY),
    Row(
        "model.init", looks.all_of(looks.exported_model, looks.spread, looks.norms_are_one),
        [(DEFAULT, ("dense", 0.15, False)), ("random", (None, 0.15, True))], HARDLY,
    ),
    Row(
        "model.dtype", looks.all_of(looks.dtypes, looks.small_updates_add_up),
        [(DEFAULT, (({"bfloat16"}, {"bfloat16"}), True)), ("float32", (({"float32"}, {"float32"}), True))],
        {"optimizer.lr": 2**-13, "optimizer.schedule": "constant", "train.steps": 8},
    ),
    Row(
        "model.trust_remote_code", looks.sorted_rows, [(DEFAULT, [0, 1, 2, 3]), (True, [1, 1, 2, 3])],
        {"model.path": "{inputs}/coded"},
    ),
    Row("model.lora.rank", looks.ranks, [(DEFAULT, {16}), (4, {4})], {"model.lora.alpha": 8.0}),
    Row("model.mtp.detach", looks.is_in_metrics("train/mtp_loss"), [(DEFAULT, False), (False, True), (True, True)],
        {"model.path": "{inputs}/mtp"}, on=MEGATRON),
]  # fmt: skip

ENGINE = [
    Row("engine.backend", looks.marker, [(DEFAULT, "megatron"), ("fsdp", "fsdp")], on=MEGATRON),
    Row(
        "engine.device", looks.noted("devices"),
        [(DEFAULT, {HERE}), ("cpu", {"cpu"}), ("cuda", Refusal("ConfigError", "engine.device: ") if HERE == "cpu" else {"cuda"})],
    ),
    Row(
        "engine.layer_spec", looks.layer_spec,
        [
            (DEFAULT, "local"), ("local", "local"), ("te", Refusal("ConfigError", "engine.layer_spec: ")),
        ] if HERE == "cpu" else [("local", "local")],
        on=MEGATRON,
    ),
    Row(
        "engine.recompute", looks.forwards,
        [(DEFAULT, {"attention": 1, "mlp": 1}), ("selective", {"attention": 1, "mlp": 2}), ("full", {"attention": 2, "mlp": 2})],
        on=MEGATRON,
    ),
    Row(
        "engine.recompute", looks.forwards,
        [(DEFAULT, {"attention": 1, "mlp": 1}), ("selective", Refusal("ConfigError", "engine.recompute")), ("full", {"attention": 2, "mlp": 2})],
        on=FSDP,
    ),
    Row(
        "engine.recompute_every", looks.forwards_of_all,
        [(DEFAULT, 4), (2, 3), (3, 3)], {"engine.recompute": "full"}, on=FSDP,
    ),
    Row(
        "engine.fsdp.replicate", looks.part_held,
        [(DEFAULT, pytest.approx([0.5, 0.5], abs=0.1)), (2, [1.0, 1.0]), (3, Refusal("ConfigError", "engine.fsdp.replicate"))],
        on=FSDP, world=2,
    ),
    Row("engine.fsdp.compile", looks.compiled, [(DEFAULT, False), (True, True)], on=FSDP),
    Row(
        "engine.micro_batch.tokens", looks.lengths,
        [(DEFAULT, [[16] * 4]), ("auto", [[16] * 4]), (20, [[16]] * 4), (32, [[16] * 2] * 2)], EVEN,
    ),
    *on_two_ranks(
        Row(
            "engine.micro_batch.tokens", looks.lengths, [(DEFAULT, [[16] * 4]), (32, [[16] * 2] * 2)],
            EVEN | {"engine.parallel.cp": 2}, what="with cp",
        ),
    ),
    Row(
        "engine.micro_batch.pad", looks.all_of(looks.lengths, looks.tokens_run),
        [(DEFAULT, ([[16] * 4], [64])), (True, ([[16] * 4], [70]))], EVEN | {"engine.micro_batch.tokens": 70}, on=MEGATRON,
    ),
    Row("engine.micro_batch.size", looks.lengths, [(DEFAULT, [[16] * 4]), (1, [[16]] * 4), (2, [[16] * 2] * 2)], EVEN),
]  # fmt: skip

TP2 = {"engine.parallel.tp": 2}
PARALLEL = on_two_ranks(
    Row("engine.parallel.tp", looks.heads, [(DEFAULT, [4, 4]), (2, [2, 2])]),
    Row("engine.parallel.pp", looks.layers_run, [(DEFAULT, [[1, 2], [1, 2]]), (2, [[1], [2]])]),
    Row(
        "engine.parallel.vpp", looks.layers_run, [(DEFAULT, [[1, 2], [3, 4]]), (2, [[1, 3], [2, 4]])],
        {"model.path": "{inputs}/deep", "engine.parallel.pp": 2},
    ),
    Row(  # two sequences on each of two replicas, or a half of four
        "engine.parallel.cp", looks.all_of(looks.lengths, looks.tokens_between_blocks),
        [(DEFAULT, ([[16] * 2], [32, 32])), (2, ([[16] * 4], [32, 32]))], EVEN,
    ),
    Row("engine.parallel.ep", looks.experts, [(DEFAULT, (4, 96)), (2, (2, 96))], MOE),
    Row("engine.parallel.etp", looks.experts, [(DEFAULT, (4, 96)), (2, (4, 48))], MOE),
    Row("engine.parallel.etp", looks.experts, [(DEFAULT, (4, 48)), (1, (4, 96))], MOE | TP2, what="with tp"),
    Row(
        "engine.parallel.etp", looks.experts, [(DEFAULT, (2, 96)), (2, Refusal("ConfigError", "engine.parallel"))],
        MOE | TP2 | {"engine.parallel.ep": 2}, what="with ep",
    ),
    Row(
        "engine.parallel.sp", looks.tokens_between_blocks, [(DEFAULT, [32, 32]), (True, [32, 32]), (False, [64, 64])],
        EVEN | TP2,
    ),
) + [
    Row(
        "engine.parallel.cp", looks.all_of(looks.lengths, looks.tokens_embedded),
        [(DEFAULT, ([[16] * 2], [{32}, {32}])), (2, ([[16] * 4], [{32}, {32}]))], EVEN, on=FSDP, world=2,
    ),
]  # fmt: skip

OPTIMIZER = [
    Row("optimizer.name", looks.optimizer_has("name", "adamw", "muon"), [(DEFAULT, ["adamw"]), ("muon", ["muon"])],
        ADAMW, on=MEGATRON),
    *(
        Row(f"optimizer.muon.{name}", looks.optimizer_has(f"muon.{name}", *values, bound=2e-3), [(DEFAULT, [values[0]]), *((value, [value]) for value in values[1:])],
            MUON, on=MEGATRON)
        for name, values in (
            ("momentum", (0.95, 0.2)), ("use_nesterov", (True, False)), ("num_ns_steps", (5, 2)),
            ("scale_mode", ("spectral", "unit_rms_norm", "shape_scaling")), ("extra_scale_factor", (0.2, 0.4)),
        )
    ),
    Row("optimizer.muon.dtype", looks.muon_is_exact, [(DEFAULT, True), ("auto", True), ("float32", True), ("bfloat16", False)],
        MUON, on=MEGATRON),
    Row("optimizer.lr", looks.optimizer_has("lr", 1e-5, 1e-2), [(DEFAULT, [1e-5]), (1e-2, [1e-2])], ADAMW),
    Row(
        "optimizer.min_lr", looks.all_of(lr, looks.optimizer_has("min_lr", 0.0, 4e-3)),
        [(DEFAULT, (rates(1, 0.75, 0.5, 0.25), [0.0])), (4e-3, (rates(1, 0.85, 0.7, 0.55), [4e-3]))],
        ADAMW | {"train.steps": 4},
    ),
    Row(
        "optimizer.betas", looks.optimizer_has("betas", (0.9, 0.95), (0.5, 0.95), (0.9, 0.5)),
        [(DEFAULT, [(0.9, 0.95)]), ([0.5, 0.95], [(0.5, 0.95)]), ([0.9, 0.5], [(0.9, 0.5)])],
        ADAMW | {"optimizer.lr": 0.1, "train.steps": 4},
    ),
    Row("optimizer.eps", looks.optimizer_has("eps", 1e-8, 1e-1), [(DEFAULT, [1e-8]), (1e-1, [1e-1])], ADAMW),
    Row("optimizer.weight_decay", looks.optimizer_has("weight_decay", 0.0, 9.0), [(DEFAULT, [0.0]), (9.0, [9.0])], ADAMW),
    Row(  # with a large eps an update is the gradient itself, and clipping it shows
        "optimizer.clip_grad", looks.optimizer_has("clip_grad", 0.0, 0.1, 1.0),
        [(DEFAULT, [1.0]), (0.1, [0.1]), (0.0, [0.0])], ADAMW | {"optimizer.eps": 10.0},
    ),
    Row(
        "optimizer.schedule", lr,
        [
            (DEFAULT, rates(*(0.5 + 0.5 * math.cos(math.pi * i / 20) for i in range(20)))),
            ("linear", rates(*(1 - i / 20 for i in range(20)))),
            ("constant", rates(*[1] * 20)),
            ("wsd", rates(*[1] * 19, 0.5)),
        ],
        {"train.steps": 20},
    ),
    Row(
        "optimizer.warmup_steps", lr, [(DEFAULT, rates(1, 1, 1, 1)), (3, rates(1 / 3, 2 / 3, 1, 1))],
        CURVE | {"optimizer.schedule": "constant"},
    ),
    Row("optimizer.decay_steps", lr, [(DEFAULT, rates(1, 0.75, 0.5, 0.25)), (2, rates(1, 0.5, 0, 0))], CURVE),
    Row(
        "optimizer.decay_steps", lr, [(DEFAULT, rates(1, 1, 1, 1)), (2, rates(1, 1, 1, 0.5))],
        CURVE | {"optimizer.schedule": "wsd"}, what="of wsd",
    ),
]  # fmt: skip

TRAIN = [
    Row(
        "data.packing", looks.all_of(looks.lengths, looks.tokens_run),
        [(DEFAULT, ([[4, 16], [8, 11]], [19, 20])), (False, ([[4, 8], [11], [16]], [11, 16, 16]))],
        UNEVEN | {"engine.micro_batch.tokens": 20},
    ),
    *on_one_backend(
        Row("train.steps", steps, [(DEFAULT, [1, 2, 3]), (1, [1]), (5, [1, 2, 3, 4, 5])], IN_TWOS),
        Row(
            "train.epochs", steps, [(DEFAULT, [1, 2, 3]), (0.5, [1, 2]), (2, [1, 2, 3, 4, 5, 6])],
            IN_TWOS | {"train.steps": DEFAULT},
        ),
        Row(
            "train.eval_every", looks.steps_with("eval/loss"), [(DEFAULT, [3]), (1, [0, 1, 2, 3]), (2, [0, 2, 3])],
            EVAL | {"train.steps": 3},
        ),
        Row("train.eval_batches", looks.evaluated_rows, [(DEFAULT, [0, 1, 2, 3, 4, 5]), (1, [0, 1, 2, 3])], EVAL),
    ),
    Row("train.global_batch_size", looks.sequences_in_first_step, [(2, 2), (4, 4)], world=2),
    Row(
        "train.guards", steps, [(DEFAULT, Refusal("TrainingError", "its gradient is zero")), (False, [1])],
        {"model.path": "{inputs}/dead"},
    ),
]  # fmt: skip

CHECKPOINT = [
    Row(
        "checkpoint.every", looks.checkpoints(), [(DEFAULT, [3]), (1, [1, 2, 3]), (2, [2, 3])],
        {"train.steps": 3, "checkpoint.keep": None}, on=MEGATRON,
    ),
    Row(
        "checkpoint.keep", looks.checkpoints(), [(DEFAULT, [3, 4]), (1, [4]), (None, [1, 2, 3, 4])],
        {"train.steps": 4, "checkpoint.every": 1},
    ),
    Row("checkpoint.export_hf", looks.loads_in_transformers, [(DEFAULT, True), (False, False)]),
]  # fmt: skip

OFFLINE = ("offline", "mine", "demo")
LOG = on_one_backend(
    Row("log.console", looks.printed, [(DEFAULT, "bar"), ("plain", "lines"), ("none", "nothing")], terminal=True),
    Row("log.console", looks.printed, [(DEFAULT, "lines"), ("plain", "lines"), ("none", "nothing")], what="in a pipe"),
    Row("log.every", looks.step_lines, [(DEFAULT, 3), (2, 3), (9, 2)], {"train.steps": 3}),
    Row("log.wandb.project", looks.wandb_run, [(DEFAULT, None), ("mine", OFFLINE)]),
    Row("log.wandb.name", looks.wandb_run, [(DEFAULT, OFFLINE), ("first", ("offline", "mine", "first"))], WANDB),
    Row("log.tensorboard", looks.tensorboard_steps, [(DEFAULT, None), (True, [1, 2])], SECOND),
)  # fmt: skip

DATA = on_one_backend(
    Row(
        "data.train", looks.sorted_rows,
        [(SUMS["data.train"], [0, 1, 2, 3]), (HUNDREDS["data.train"], [100, 101, 102, 103])],
    ),
    Row(
        "data.eval", looks.all_of(looks.eval_loss_is_train_loss, looks.evaluated_rows),
        [
            (DEFAULT, (None, [])), (SUMS["data.train"], (True, [0, 1, 2, 3])),
            ({"a": SUMS["data.train"], "b": {"path": "{inputs}/saved"}}, (False, [0, 1, 2, 3, 300, 301, 302, 303])),
        ],
        HARDLY,
    ),
    Row(
        "data.chat_template", looks.first_text,
        [
            (DEFAULT, "<|im_start|>user\n0=<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"),
            ("{inputs}/plain.jinja", "0=0<|im_end|>"),
        ],
        IN_ORDER,
    ),
    Row(
        "data.truncation", looks.all_of(looks.ends, looks.left_out),
        [
            (DEFAULT, Refusal("DataError", "uneven.jsonl:1: the row has 17 tokens")),
            ("right", ([(3, 12), (3, 7), (3, 12), (3, 11)], "truncated: 2")),
            ("left", ([(10, 19), (3, 7), (5, 14), (3, 11)], "truncated: 2")),
            ("drop", ([(3, 7), (3, 11), (3, 7), (3, 11)], "dropped: 4")),
        ],
        UNEVEN | {"data.max_length": 10},
    ),
    Row(
        "data.shuffle", looks.epochs,
        [
            (DEFAULT, {"as in the file": False, "the same again": False}),
            (False, {"as in the file": True, "the same again": True}),
        ],
        SIX | {"train.global_batch_size": 6, "train.steps": 2},
    ),
)  # fmt: skip

TEACHER = on_one_backend(
    Row(  # its weights are the student's
        "teacher.model.dtype", lambda run: run.metrics[0]["distill/divergence"] == 0,
        [(DEFAULT, True), ("float32", True), ("bfloat16", False)],
        IN_ORDER | {"train.guards": False, "teacher.model.path": DENSE["model.path"]},
    ),
)  # fmt: skip

ROWS = [*RUN, *MODEL, *ENGINE, *PARALLEL, *OPTIMIZER, *DATA, *TRAIN, *TEACHER, *CHECKPOINT, *LOG]

IN_OTHER_TESTS = {
    **of_section("model.lora", "alpha rslora target_modules exclude_modules", "engine/test_lora_selection.py"),
    **of_section("model.lora", "dropout", "engine/test_lora_megatron.py"),
    **of_section("model.lora", "export", "trainers/test_lora.py"),
    **of_section("model.mtp", "loss_weight", "engine/test_mtp.py"),
    **of_section("engine", "attention", "engine/test_layer_spec_of_ranks.py"),
    **of_section("engine", "recompute_modules", "engine/test_recompute.py"),
    **of_section("engine", "offload", "engine/test_offload.py"),
    **of_section("engine", "batch_invariant", "engine/test_generation.py"),
    **of_section("engine", "cuda_graphs", "engine/train_graphs.py"),
    **of_section("engine", "options", "engine/test_registry.py"),
    **of_section("engine", "megatron", "engine/test_padding.py"),
    **of_section("engine.fsdp", "reshard_after_forward", "engine/test_fsdp_defer.py"),
    **of_section("engine.fsdp", "defer_sync", "engine/test_fsdp_defer.py"),
    **of_section("engine.moe", "aux_loss z_loss", "engine/test_router_losses.py"),
    **of_section("engine.moe", "grouped_mm", "engine/test_grouped.py"),
    **of_section("data", "split format columns loss_on system max_length on_bad_row stream shuffle_buffer", "data/test_source_keys.py"),
    **of_section("data", "mix_by", "data/test_mixture.py"),
    **of_section("data", "turns", "data/test_dialogue.py"),
    **of_section("data", "teacher", "trainers/test_distill.py"),
    **of_section("teacher", "model.path loss beta temperature top_k weight others cache", "trainers/test_distill.py"),
    **of_section("teacher.server", "url name concurrency timeout_s key_variable", "trainers/test_teacher_server.py"),
    **of_section("checkpoint", "resume", "trainers/test_sft.py"),
    **of_section("checkpoint", "remote", "resume/test_remote.py"),
    **of_section("checkpoint", "background", "resume/test_background.py"),
    **of_section("log.wandb", "mode", "test_metrics.py"),
}  # fmt: skip
"""Key -> the file of tests where it is seen. An engine's keys are given to it whole, as those of `teacher.engine` are."""
IN_OTHER_TESTS |= {
    key.path: "tests/config/test_teacher_checks.py"
    for key in walk_keys(SFTConfig)
    if key.path.startswith("teacher.engine.")
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    inputs.make(folder)
    return Runs(folder, tmp_path_factory.mktemp("runs"))


FOR_ALL = (
    "model.trust_remote_code", "engine.device", "engine.micro_batch.tokens", "engine.micro_batch.size", "optimizer.min_lr",
    "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps",
)  # fmt: skip
OF_ENGINES = [row for row in (*MODEL, *ENGINE, *PARALLEL, *OPTIMIZER) if row.key not in FOR_ALL]
"""What each backend reads by code of its own: the nights see both. Any other key is seen on one of them."""


def cases() -> list[Any]:
    """CI sees each row on one backend, and of Muon's keys one."""
    found = []
    for number, row in enumerate(ROWS):
        in_ci = row.on[number % len(row.on)]
        for backend in row.on if row in OF_ENGINES else [in_ci]:
            nightly = backend != in_ci or (
                row.key.startswith("optimizer.muon.") and row.key != "optimizer.muon.momentum"
            )
            mark = pytest.mark.nightly if nightly else pytest.mark.slow
            found.append(pytest.param(row, backend, id=f"{row}, {backend}", marks=mark))
    return found


@pytest.mark.parametrize("row, backend", cases())
def test_key_reaches_what_it_configures(runs: Runs, row: Row, backend: str):
    runs.check(row, backend)


def test_every_key_has_a_row():
    assert {row.key for row in ROWS} | {*IN_OTHER_TESTS} == {key.path for key in walk_keys(SFTConfig)}


def test_every_choice_is_made():
    for key in (key for key in walk_keys(SFTConfig) if key.path not in IN_OTHER_TESTS):
        made = [
            key.default if value == DEFAULT else value for row in ROWS if row.key == key.path for value, _ in row.seen
        ]
        made += [item for value in made if isinstance(value, list) for item in value]
        missing = [choice for choice in choices(key.annotation) if choice not in made]
        assert not missing, f"{key.path}: no row sets it to {missing}"


def choices(annotation: Any) -> list[Any]:
    """The values of a key that has few."""
    if annotation is bool:
        return [True, False]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) if part is not Ellipsis for choice in choices(part)]


def test_every_row_sees_a_difference():
    for row in ROWS:
        assert len({repr(expected) for _, expected in row.seen}) > 1, row
