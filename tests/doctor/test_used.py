"""What a run will use: the answers are those of the functions that choose, on machines with and without GPUs."""

import dataclasses

import pytest
import torch
from packaging.version import Version

from mrl.config.schema import EngineConfig
from mrl.doctor import choices, used
from mrl.doctor.choices import MODELS
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in, layer_spec, platform, te_limits
from mrl.mcore_models.te_limits import Gpu
from mrl.mcore_models.versions import NOT_INSTALLED
from mrl.ops import causal, devices
from tests.doctor.conftest import by_name
from tests.doctor.machines import SEGFAULTS, package

DENSE, EXPERTS, SINKS, LATENT = MODELS
A100, H100 = (
    Gpu((8, 0), Version("2.8.3"), (9, 25, 1), Version("2.20.2")),
    Gpu((9, 0), Version("2.8.3"), (9, 25, 1), Version("2.20.2")),
)


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpu, te=..., apex=...)`: a GPU, and why packages are not used."""

    def make(gpu, te=None, apex="is not installed"):
        monkeypatch.setattr(devices, "has_gpu", lambda: gpu is not None)
        monkeypatch.setattr(devices, "device", lambda: torch.device("cpu"))
        monkeypatch.setattr(platform, "without_transformer_engine", lambda: platform.NO_GPU if gpu is None else te)
        monkeypatch.setattr(Gpu, "here", classmethod(lambda cls: Gpu() if gpu is None else gpu))

    return make


def rows():
    found = choices.rows()
    assert [(row["model"], row["cp"]) for row in found] == [(model, cp) for model in MODELS for cp in (1, 2)]
    return {(row["model"], row["cp"]): row for row in found}


def words(found):
    return by_name(
        used.section(used.Choices(rows=tuple(found.values()), megatron="loads", error="x"), torch_works=True)
    )


def test_without_a_gpu_all_is_local(machine):
    machine(None)
    found = rows()
    assert {row["spec"] for row in found.values()} == {"local"}
    assert found[DENSE, 1]["attention"] == ["sdpa"] and found[DENSE, 2]["attention"] == ["flash"]
    assert found[SINKS, 1]["attention"] == ["flash"]
    said = words(found)
    specs = [finding for name, finding in said.items() if name.startswith("used.spec")]
    assert {finding.level for finding in specs} == {"note"}
    assert [finding.what.partition(" with one and ")[2] for finding in specs] == [
        "transformer-engine it is te (A100, L40S: beside flash-attn 2))",
        "transformer-engine it is te (A100, L40S: local too))",
        "transformer-engine it is te (A100, L40S, RTX 50: beside flash-attn 2))",
    ]


def test_on_a_gpu_it_is_what_the_tables_of_limits_say(machine):
    machine(H100)
    found = rows()
    assert {row["spec"] for row in found.values()} == {"te"}
    assert {row["attention"][0] for row in found.values()} == {"fused"}, "of all that serve, what is taken"
    assert [found[model, 2]["cp_communication"] for model in (DENSE, SINKS)] == ["p2p", "a2a"]
    assert words(found)["used.spec"].level == "ok"
    table = used.table(used.Choices(rows=tuple(found.values())))
    assert table[1][:4] == [DENSE, "1", "te", "cuDNN (fused)"]
    assert table[2][:4] == ["", "2 or more", "te", "cuDNN (fused) by p2p"]
    assert len({len(row) for row in table}) == 1


def test_a100_without_flash_attn_takes_the_local_spec(machine):
    machine(A100)
    assert {row["attention"][0] for row in rows().values() if row["model"] in (DENSE, LATENT)} == {"flash"}
    machine(dataclasses.replace(A100, flash_attn=NOT_INSTALLED))
    found = rows()
    assert found[DENSE, 1]["spec"] == "local" and "attention is the unfused one" in found[DENSE, 1]["why"]
    assert found[DENSE, 2]["spec"] == "local" and "without flash-attn 2" in found[DENSE, 2]["why"]
    said = [finding for finding in words(found).values() if "unfused" in finding.what]
    assert said and "it does not under flash-attn 2" in said[0].what
    assert any(
        f"for {DENSE} at cp 2" in finding.what or f"{DENSE} at cp 2" in finding.what
        for finding in words(found).values()
    )


def test_a_broken_transformer_engine_stops_a_run_in_the_words_of_the_run(machine):
    machine(H100, te="OSError: libcudart.so.12")
    found = rows()
    with pytest.raises(ConfigError) as stops:
        layer_spec.choose(
            EngineConfig(), {"num_attention_heads": 8, "hidden_size": 512}, choices_dims(), dtype=torch.bfloat16
        )
    assert {row["error"] for row in found.values()} == {str(stops.value)}
    said = words(found)["used.spec"]
    assert said.level == "fault" and str(stops.value) in said.what
    assert used.table(used.Choices(rows=tuple(found.values())))[1] == [DENSE, "any", "refused", "-", "-", "-"]


def choices_dims():
    from mrl.parallel import ParallelDims

    return ParallelDims()


def test_the_local_attention_is_asked_with_tensors_of_the_model(machine, monkeypatch):
    """Heads of 192 and 128, 128 heads; a window where layers have one; queries of half the keys under cp 2."""
    seen = []
    way = causal.attention_kind

    def record(query, keys, value, **options):
        seen.append((tuple(query.shape), tuple(value.shape), keys, options["window"], options["sinks"]))
        return way(query, keys, value, **options)

    machine(None)
    monkeypatch.setattr(causal, "attention_kind", record)
    rows()
    assert ((1, 128, 64, 192), (1, 128, 64, 128), 64, None, False) in seen
    assert ((1, 64, 32, 64), (1, 8, 64, 64), 64, 16, True) in seen and (
        (1, 64, 64, 64),
        (1, 8, 64, 64),
        64,
        None,
        True,
    ) in seen


@pytest.mark.slow
def test_modules_and_optimizer_are_megatrons(monkeypatch):
    cpu_stand_in.prepare()
    from megatron.core.optimizer import Adam

    from mrl.engine.megatron import optim

    found = choices.rows()
    made = dict(zip([(row["model"], row["cp"]) for row in found], choices.modules(found), strict=True))
    assert made[DENSE, 1] == {
        "attention": "SdpaAttention",
        "norm": "RMSNorm",
        "linear": "RowParallelLinear",
        "experts": None,
    }
    assert {made[model, 1]["experts"] for model in (EXPERTS, SINKS, LATENT)} == {"SequentialMLP"}
    assert made[LATENT, 2]["attention"] == "SdpaAttention"
    assert optim.implementations() == {
        "optimizer": f"{Adam.__module__}.{Adam.__name__}", "norm": "megatron.core.utils.local_multi_tensor_l2_norm",
    }  # fmt: skip
    assert issubclass(Adam, torch.optim.AdamW)
    table = used.table(used.Choices(rows=found, modules=list(made.values())))
    assert table[3][-2:] == ["RMSNorm", "one after another"]
    monkeypatch.setattr(devices, "capability", lambda: (9, 0))
    made = [one and one["experts"] for one in choices.modules(found)]
    assert [made[i] for i, row in enumerate(found) if row["cp"] == 1] == [
        None,
        "grouped_mm",
        "SequentialMLP",
        "grouped_mm",
    ]
    assert used.table(used.Choices(rows=found, modules=choices.modules(found)))[3][-1] == "torch's grouped_mm"


@pytest.mark.slow
def test_refused_rows_have_no_modules():
    cpu_stand_in.prepare()
    assert choices.modules([{"model": DENSE, "cp": 1, "error": "no"}]) == [None]


@pytest.mark.parametrize(
    "torch_text, says",
    [("raise OSError('libtorch.so')", "OSError: libtorch.so"), ("import os; os.abort()", "ended by SIGABRT")],
)
def test_a_process_that_breaks_says_how_far_it_came(site, torch_text, says):
    """It is not come to megatron-core: that is not blamed."""
    package(site, "torch", torch_text)
    found = used.choices()
    assert says in found.error and not found.rows
    assert found.imported_megatron.error is None and found.imported_megatron.blocked_by == used.UNKNOWN_LINE
    assert by_name(used.section(found, torch_works=True))["used"].level == "fault"
    assert by_name(used.section(found, torch_works=False))["used"].level == "note"


def test_how_far_the_process_came_with_megatron():
    rows = ({"model": DENSE, "cp": 1, "spec": "local", "why": "x", "attention": ["sdpa"], "cp_communication": None},)
    before = used.Choices(rows=rows, error="OSError: of the layer spec")
    assert before.imported_megatron.blocked_by == used.UNKNOWN_LINE, "not blamed, and not listed as loading"
    begun = dataclasses.replace(before, megatron="begun")
    assert begun.imported_megatron.error == begun.error and "used.modules" not in by_name(
        used.section(begun, torch_works=True)
    )
    assert dataclasses.replace(before, megatron="loads").imported_megatron.works


MEGATRONS = {
    # how it breaks: what is in megatron/core, and what the doctor says of it
    "raises": ("raise ImportError('cannot import name y')", "ImportError: cannot import name y"),
    "segmentation fault": (SEGFAULTS, "its import ends the process (ended by SIGSEGV)"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MEGATRONS)
def test_a_megatron_that_does_not_load_is_blamed(site, kind):
    """The functions that choose are asked in a real process, in which it is found first."""
    text, says = MEGATRONS[kind]
    package(site / "megatron", "core", text)
    found = used.choices()
    assert found.rows and found.megatron == "begun" and found.imported_megatron.error == says, found
    names = {name.partition(".spec")[0] for name in by_name(used.section(found, torch_works=True))}
    assert names == {"used", "used.fsdp"}, "of what needs megatron nothing but the layer specs is said"
    whole = dataclasses.replace(found, megatron="loads")
    assert whole.imported_megatron.works
    assert by_name(used.section(whole, torch_works=True))["used.modules"].level == "warning"


def test_kernels_have_words():
    """A kernel that is added to the tables is shown as it is, and shall have words."""
    from typing import get_args

    assert set(used.KERNELS["te"]) == set(get_args(te_limits.Kernel))
    assert set(used.KERNELS["local"]) == set(get_args(causal.AttentionKind))
