"""What a run will use: the answers are those of the functions that choose, on machines with and without GPUs."""

import dataclasses

import pytest
import torch
from packaging.version import Version

from mrl.config.schema import EngineConfig
from mrl.doctor import used
from mrl.doctor.used import MODELS
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in, layer_spec, platform, te_limits
from mrl.mcore_models.te_limits import Gpu
from mrl.mcore_models.versions import NOT_INSTALLED
from mrl.ops import causal, devices
from mrl.parallel import ParallelDims
from tests.doctor.conftest import by_name, package

DENSE, EXPERTS, SINKS, LATENT = MODELS
A100, H100 = (Gpu(of, Version("2.8.3"), (9, 25, 1), Version("2.20.2")) for of in ((8, 0), (9, 0)))


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpu, te=..., apex=...)`: a GPU, and why packages are not used."""

    def make(gpu, te=None, apex="is not installed"):
        monkeypatch.setattr(devices, "has_gpu", lambda: gpu is not None)
        monkeypatch.setattr(devices, "device", lambda: torch.device("cpu"))
        monkeypatch.setattr(platform, "without_transformer_engine", lambda: platform.NO_GPU if gpu is None else te)
        monkeypatch.setattr(Gpu, "here", classmethod(lambda cls: Gpu() if gpu is None else gpu))

    return make


NO_MODULES = {"norm": "n", "experts": None}


def rows(modules=lambda row: NO_MODULES):
    found = [row | ({"modules": modules(row)} if "spec" in row else {}) for row in used.rows()]
    assert [(row["model"], row["cp"]) for row in found] == [(model, cp) for model in MODELS for cp in (1, 2)]
    return {(row["model"], row["cp"]): row for row in found}


def words(found):
    optimizer = {"optimizer": "AdamW", "norm": "l2"}
    return by_name(used.section({"rows": list(found.values()), "optimizer": optimizer}))


def test_without_a_gpu_all_is_local(machine):
    machine(None)
    found = rows()
    assert {row["spec"] for row in found.values()} == {"local"}
    assert found[DENSE, 1]["attention"] == ["sdpa"] and found[DENSE, 2]["attention"] == ["flash"]
    assert found[SINKS, 1]["attention"] == ["flash"]
    said = words(found)
    specs = [finding for name, finding in said.items() if name.startswith("used.spec")]
    assert {finding.level for finding in specs} == {"note"}
    assert [finding.what.partition(" it is ")[2] for finding in specs] == [
        "te on A100, L40S, H100, B200, RTX 50)", "te on H100, B200, RTX 50)"
    ]  # fmt: skip


def test_on_a_gpu_it_is_what_the_tables_of_limits_say(machine):
    machine(H100)
    found = rows()
    assert {row["spec"] for row in found.values()} == {"te"}
    assert {row["attention"][0] for row in found.values()} == {"fused"}, "of all that serve, what is taken"
    assert [found[model, 2]["cp_communication"] for model in (DENSE, SINKS)] == ["p2p", "a2a"]
    assert words(found)["used.spec"].level == "ok"
    table = used.table(list(found.values()))
    assert table[1][:4] == [DENSE, "1", "te", "cuDNN (fused)"]
    assert table[2][:4] == [DENSE, "2 or more", "te", "cuDNN (fused) by p2p"]
    assert len({len(row) for row in table}) == 1


def test_a100_without_flash_attn_takes_the_local_spec(machine):
    machine(A100)
    assert {row["attention"][0] for row in rows().values() if row["model"] in (DENSE, LATENT)} == {"flash"}
    machine(dataclasses.replace(A100, flash_attn=NOT_INSTALLED))
    found = rows()
    assert found[DENSE, 1]["spec"] == "local" and "is the unfused one" in found[DENSE, 1]["why"]
    assert found[DENSE, 2]["spec"] == "local" and "without flash-attn from 2" in found[DENSE, 2]["why"]
    said = [finding for finding in words(found).values() if "unfused" in finding.what]
    assert said and "attention without flash-attn from 2" in said[0].what


def test_a_broken_transformer_engine_stops_a_run_in_the_words_of_the_run(machine):
    machine(H100, te="OSError: libcudart.so.12")
    found = rows()
    with pytest.raises(ConfigError) as stops:
        hf = {"num_attention_heads": 8, "hidden_size": 512}
        layer_spec.choose(EngineConfig(), hf, ParallelDims(), dtype=torch.bfloat16)
    assert {row["error"] for row in found.values()} == {str(stops.value)}
    said = words(found)["used.spec"]
    assert said.level == "fault" and str(stops.value) in said.what
    assert used.table(list(found.values()))[1] == [DENSE, "1", "refused", "-", "-", "-"]


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
    assert ((1, 64, 32, 64), (1, 8, 64, 64), 64, 16, True) in seen
    assert ((1, 64, 64, 64), (1, 8, 64, 64), 64, None, True) in seen


@pytest.mark.slow
def test_modules_and_optimizer_are_megatrons(monkeypatch):
    cpu_stand_in.prepare()
    from megatron.core.optimizer import Adam

    from mrl.engine.megatron import optim

    found = rows(used.modules)
    assert found[DENSE, 1]["modules"] == {
        "attention": "SdpaAttention", "norm": "RMSNorm", "linear": "RowParallelLinear", "experts": None,
    }  # fmt: skip
    assert {found[model, 1]["modules"]["experts"] for model in (EXPERTS, SINKS, LATENT)} == {"SequentialMLP"}
    assert optim.implementations() == {
        "optimizer": f"{Adam.__module__}.{Adam.__name__}", "norm": "megatron.core.utils.local_multi_tensor_l2_norm",
    }  # fmt: skip
    assert issubclass(Adam, torch.optim.AdamW)
    assert used.table(list(found.values()))[3][-2:] == ["RMSNorm", "one after another"]
    monkeypatch.setattr(devices, "capability", lambda: (9, 0))
    found = rows(used.modules)
    experts = [found[model, 1]["modules"]["experts"] for model in MODELS]
    assert experts == [None, "grouped_mm", "SequentialMLP", "grouped_mm"]
    assert used.table(list(found.values()))[3][-1] == "torch's grouped_mm"


def test_a_process_that_breaks_is_quoted(site):
    """The functions that choose are asked in a real process, in which the broken package is found first."""
    package(site / "megatron" / "core", "", "raise ImportError('no name y')")
    found = used.choices()
    assert "ImportError: no name y" in found["error"] and by_name(used.section(found))["used"].level == "fault"


def test_kernels_have_words():
    """A kernel that is added to the tables is shown as it is, and shall have words."""
    from typing import get_args

    assert set(used.KERNELS["te"]) == set(get_args(te_limits.Kernel))
    assert set(used.KERNELS["local"]) == set(get_args(causal.AttentionKind))
