"""Which layer spec is chosen, and what installations of transformer-engine and apex do that are broken.

The packages here are folders that fail as real ones do: transformer-engine without its torch extension (what
`pip install transformer-engine` leaves where the extension is not built), one built for another torch or CUDA, and the
apex that PyPI has, which is another program.
"""

import contextlib
import importlib
import sys

import pytest
import torch
from packaging.version import Version

from mrl.config.schema import EngineConfig, MoEConfig
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in, layer_spec, platform, te_limits, versions
from mrl.ops import devices
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import read_hf_config
from tests.engine import tiny

BROKEN = {
    "no torch extension": (
        # what transformer_engine/__init__.py does: it catches what its own part for torch raises
        {
            "__init__.py": "try:\n    from . import pytorch\nexcept FileNotFoundError:\n    pass",
            "pytorch.py": "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')",
        },
        "FileNotFoundError: Could not find shared object file",
    ),
    "another torch": (
        {
            "__init__.py": "from . import common, pytorch",
            "common.py": "",
            "pytorch.py": "raise ImportError('transformer_engine_torch.so: undefined symbol: _ZN3c104cuda9SetDeviceEab')",
        },
        "ImportError: transformer_engine_torch.so: undefined symbol",
    ),
}
WORKS = {"__init__.py": "", "pytorch.py": ""}
OTHER_APEX = {"__init__.py": "from pyramid.config import Configurator"}
DENSE = {"num_layers": 2, "num_attention_heads": 8, "num_query_groups": 8, "hidden_size": 512}
ONE = ParallelDims()
H100 = te_limits.Gpu((9, 0), versions.NOT_INSTALLED)
FLASH = te_limits.Gpu((8, 0), Version("2.8.3"), transformer_engine=Version("2.20.2"))


def spec_for(wanted, dtype=torch.bfloat16, *, fields=DENSE, dims=ONE, elsewhere=False, kept=None, **keys):
    engine = EngineConfig(layer_spec=wanted, **keys)
    return layer_spec.choose(engine, fields, dims, dtype=dtype, elsewhere=elsewhere, kept=kept)


def install(folder, package, files):
    (folder / package).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / package / name).write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(gpu=..., here=..., transformer_engine=files)`: a GPU and what is installed; nothing of it stays."""
    found = {name: sys.modules.get(name) for name in list(sys.modules) if name.split(".")[0] in PACKAGES}
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*, gpu, here=None, **packages):
        monkeypatch.setattr(devices, "has_gpu", lambda: gpu)
        if here is not None:
            monkeypatch.setattr(te_limits.Gpu, "here", lambda: here)
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        for package, files in packages.items():
            install(tmp_path, package, files)
        importlib.invalidate_caches()
        platform.without_transformer_engine.cache_clear()
        platform.without_apex.cache_clear()

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.modules.update(found)
    platform.without_transformer_engine.cache_clear()
    platform.without_apex.cache_clear()


PACKAGES = ("transformer_engine", "apex", "amp_C")


@pytest.mark.parametrize("kind", BROKEN)
def test_one_that_does_not_load_is_one_line_and_no_silent_switch(machine, kind):
    """And megatron sees none: it asks by `except ImportError`, and of a package that loads in part takes the rest for granted."""
    files, says = BROKEN[kind]
    machine(gpu=True, transformer_engine=files, apex=OTHER_APEX)
    for wanted in ("auto", "te"):
        with pytest.raises(ConfigError) as refusal:
            spec_for(wanted)
        message = str(refusal.value)
        assert message.startswith(
            f'engine.layer_spec: value "{wanted}" finds transformer-engine, which does not load ('
        )
        assert says in message and "set local" in message and "\n" not in message, message
    assert spec_for("local").name == "local"
    platform.hide_what_does_not_load()
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch", "apex"):
        with pytest.raises(ImportError):
            importlib.import_module(name)  # as `from NAME import ...` does, which is content with a part alone
    assert "apex is installed and not used" in layer_spec.notes(spec_for("local"))[1]


@pytest.mark.parametrize(
    "gpu, packages, wanted, expected",
    [
        (
            False,
            {"transformer_engine": BROKEN["another torch"][0]},
            "auto",
            "local (torch sees no GPU; with one, transf",
        ),
        (True, {}, "auto", "local (transformer-engine is not installed)"),
        (True, {"transformer_engine": WORKS}, "auto", "te (transformer-engine is installed, and there is a GPU)"),
        (True, {"transformer_engine": WORKS}, "te", "te (as configured)"),
        (True, {"transformer_engine": WORKS}, "local", "local (as configured)"),
    ],
)
def test_choice(machine, gpu, packages, wanted, expected):
    machine(gpu=gpu, **packages)
    [line] = layer_spec.notes(spec_for(wanted))
    assert line.startswith(f"engine.layer_spec: {expected}"), line


@pytest.mark.parametrize(
    "gpu, says",
    [(False, "needs a GPU, and torch sees none"), (True, "needs transformer-engine, which is not installed")],
)
def test_te_that_cannot_be_had_is_refused(machine, gpu, says):
    machine(gpu=gpu)
    with pytest.raises(ConfigError, match=f'engine.layer_spec: value "te" {says}; set auto or local'):
        spec_for("te")


def test_what_transformer_engine_refuses(machine):
    """Heads that cp cannot split, of a model with sinks: `te_limits` says so of any GPU, and --dry-run where there is
    none."""
    sinks, layout = DENSE | {"softmax_type": "learnable"}, ParallelDims(world_size=16, tp=8, cp=2)
    why = "transformer-engine has attention sinks under cp 2 only where cp divides the heads"
    machine(gpu=True, here=te_limits.Gpu(), transformer_engine=WORKS)  # of a generation that is not known
    chosen = spec_for("auto", fields=sinks, dims=layout)
    assert str(chosen).startswith(f"engine.layer_spec: local ({why}")
    with pytest.raises(ConfigError, match=f'value "te" does not work here: {why}'):
        spec_for("te", fields=sinks, dims=layout)
    machine(gpu=False)
    assert f"it is local too: {why}" in str(spec_for("auto", fields=sinks, dims=layout))


def test_what_its_attention_has_for_a_dtype(machine):
    """No kernel of transformer-engine's has fp32 but the unfused one, which context parallelism has not."""
    machine(gpu=True, here=te_limits.Gpu((9, 0)), transformer_engine=WORKS)
    cp = ParallelDims(world_size=2, cp=2)
    for wanted, name in (("auto", "local"), ("te", "te")):
        slow = spec_for(wanted, torch.float32)
        assert slow.name == name and "attention in float32 is the unfused one" in str(slow)
        assert "unfused" not in str(spec_for(wanted)) and spec_for(wanted, dims=cp).name == "te"
    chosen = spec_for("auto", torch.float32, dims=cp)
    assert str(chosen).startswith("engine.layer_spec: local (transformer-engine has no kernel for attention in float32")
    with pytest.raises(ConfigError, match="no kernel for attention in float32 under cp 2"):
        spec_for("te", torch.float32, dims=cp)


def test_an_apex_without_its_kernels_is_not_used(machine):
    """Built for Python alone it is imported, and its optimizer fails when it is made."""
    apex = {"__init__.py": "", "optimizers.py": "", "multi_tensor_apply.py": ""}
    machine(gpu=True, apex=apex)
    assert "No module named 'amp_C'" in layer_spec.notes(spec_for("auto"))[1]
    machine(gpu=True, apex=apex, amp_C={"__init__.py": ""})
    assert platform.without_apex() is None and len(layer_spec.notes(spec_for("auto"))) == 1


def test_models_live_on_the_processs_own_gpu(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.device() == torch.device("cuda", 3)


@pytest.mark.parametrize("spec, ways", [("local", None), ("te", "a2a")])
def test_windows_under_cp_are_exchanged_as_transformer_engine_can(spec, ways, tmp_path):
    """Its default, a ring, has no windows."""
    cpu_stand_in.prepare()
    from mrl.mcore_models.build import transformer_config

    hf = read_hf_config(tiny.make_model(str(tmp_path), "mixtral", sliding_window=5))
    dims = ParallelDims(world_size=2, cp=2)
    assert transformer_config(hf, dims, dtype=torch.float32, layer_spec=spec).cp_comm_type == ways


def test_auto_is_local_where_only_the_unfused_attention_is_left(machine):
    """An A100 without flash-attn: scores of whole rows under te, a flash kernel under local. te stays te where asked."""
    machine(gpu=True, here=te_limits.Gpu((8, 0), versions.NOT_INSTALLED), transformer_engine=WORKS)
    chosen = spec_for("auto")
    assert chosen.name == "local" and "is the unfused one, whose memory grows" in chosen.why
    assert "without flash-attn from 2" in chosen.why and spec_for("te").name == "te"
    machine(gpu=True, here=FLASH, transformer_engine=WORKS)
    assert spec_for("auto").name == "te"


@pytest.mark.parametrize(
    "fields, off, taken",
    [
        (DENSE, None, "te on A100, L40S, H100, B200, RTX 50"),
        (DENSE, "NVTE_FLASH_ATTN", "te on H100, B200, RTX 50"),
        (DENSE | {"num_moe_experts": 32, "moe_ffn_hidden_size": 512, "moe_router_topk": 4}, None, "te on A100, L40S, B200, RTX 50"),
    ],
)  # fmt: skip
def test_a_dry_run_without_a_gpu_says_on_which_ones_te_is_taken(machine, monkeypatch, fields, off, taken):
    """By what `auto` is there, where transformer-engine is installed."""
    machine(gpu=False)
    if off is not None:
        monkeypatch.setenv(off, "0")
    why = spec_for("auto", fields=fields, elsewhere=True).why
    assert why == f"torch sees no GPU; with one, transformer-engine and flash-attn 2 it is {taken}"
    for at, name in te_limits.GENERATIONS.items():
        machine(gpu=True, here=te_limits.Gpu(at, Version("2.8.3")), transformer_engine=WORKS)
        assert (spec_for("auto", fields=fields).name == "te") is (name in taken), name


def test_te_is_said_by_rules_where_no_gpu_is(machine, monkeypatch):
    machine(gpu=False)
    chosen = spec_for("te", elsewhere=True)
    assert chosen.name == "te" and "torch sees no GPU, and a run needs one" in chosen.why
    assert "which one was not tried" in chosen.why and "square" not in chosen.why
    slow = spec_for("te", torch.float32, elsewhere=True)
    assert "attention in float32 is the unfused one" in slow.why
    sinks, cp3 = DENSE | {"softmax_type": "learnable"}, ParallelDims(world_size=3, cp=3)
    with pytest.raises(ConfigError, match="transformer-engine has attention sinks under cp 3 only where"):
        spec_for("te", fields=sinks, dims=cp3, elsewhere=True)
    with pytest.raises(ConfigError, match="transformer-engine has attention sinks under cp 3 only where"):
        layer_spec.check_rules(sinks, cp3)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="on any GPU with NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 and NVTE_UNFUSED"):
        layer_spec.check_rules(DENSE, ONE)


@pytest.mark.parametrize(
    "attention, wanted, variables, gpu, said",
    [
        ("flash", "auto", {}, FLASH, None),
        ("fused", "te", {"NVTE_FUSED_ATTN": "1"}, H100, None),
        ("unfused", "auto", {}, H100, None),  # which auto alone takes for no model
        ("flash", "auto", {}, H100, "value \"flash\" is for engine.layer_spec te, which does not work here: .* without flash-attn from 2.1.1 "),
        ("fused", "auto", {}, FLASH, "which does not work here: .* 8.0; leave"),
        ("flash", "local", {}, FLASH, "value \"flash\" is a kernel of transformer-engine, and engine.layer_spec local"),
        ("flash", "auto", {"NVTE_FLASH_ATTN": "0"}, FLASH, "NVTE_FLASH_ATTN=1 .*the environment has NVTE_FLASH_ATTN=0"),
        ("flash", "auto", {"NVTE_FUSED_ATTN": "1"}, FLASH, "NVTE_FUSED_ATTN=0 .*the environment has NVTE_FUSED_ATTN=1"),
        ("flash", "auto", {}, None, "is for engine.layer_spec te, which needs a GPU, and torch sees none"),
    ],
)  # fmt: skip
def test_a_kernel_of_attention_is_te_or_refused(machine, monkeypatch, attention, wanted, variables, gpu, said):
    machine(gpu=gpu is not None, here=gpu, transformer_engine=WORKS)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = (
        contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=rf"^engine\.attention: .*{said}")
    )
    with refused:
        assert spec_for(wanted, attention=attention).name == "te"


def test_te_for_another_machine_is_not_refused_by_the_gpu_that_is_here(machine):
    """A login node with an A100 and no flash-attn, of a cluster of H100: cp has a kernel there alone."""
    machine(gpu=True, here=te_limits.Gpu((8, 0), versions.NOT_INSTALLED))
    cp2 = ParallelDims(world_size=2, cp=2)
    layer_spec.check_rules(DENSE, cp2)
    with pytest.raises(ConfigError, match="no kernel for attention in float32 under cp 2 on any GPU"):
        layer_spec.check_rules(DENSE, cp2, dtype=torch.float32)


EXPERTS = DENSE | {"hidden_size": 1024, "num_moe_experts": 32, "moe_ffn_hidden_size": 768, "moe_router_topk": 4}


@pytest.mark.parametrize(
    "engine, fields, given, is_local",
    [
        ({}, {}, {}, True),
        ({"recompute": "selective", "recompute_modules": ("moe",), "moe": MoEConfig(grouped_mm=True)}, {"hidden_size": 512, "num_moe_experts": 64, "moe_router_topk": 2}, {"dims": ParallelDims(world_size=4, pp=2)}, True),
        ({"moe": MoEConfig(grouped_mm=False)}, {}, {}, False),
        ({}, {}, {"lora": True}, False),
        ({"megatron": {"fp8": "hybrid"}}, {}, {}, False),
        ({"megatron": {"moe_expert_capacity_factor": 2.0}}, {}, {}, False),
        ({"recompute_modules": ("moe_act",)}, {}, {}, False),
        ({}, {"add_bias_linear": True}, {}, False),
        ({}, {"window_size": (15, 0)}, {}, False),
        ({}, {}, {"dims": ParallelDims(world_size=2, cp=2)}, False),
        ({}, {"hidden_size": 2048}, {}, False),
        ({}, {"moe_ffn_hidden_size": 772}, {}, False),
        ({}, {"num_moe_experts": 16}, {}, False),
        ({}, {"moe_router_topk": 8}, {}, False),
        ({}, {"num_moe_experts": 64}, {"dims": ParallelDims(world_size=2, ep=2)}, False),
        ({}, {}, {"kept": "te"}, False),
    ],
)  # fmt: skip
def test_experts_are_local_where_that_was_measured_faster(machine, engine, fields, given, is_local):
    engine, fields, given = EngineConfig(**engine), EXPERTS | fields, {"dims": ONE, "dtype": torch.bfloat16} | given
    for capability in ((8, 0), (9, 0)):
        machine(gpu=True, here=te_limits.Gpu(capability, Version("2.8.3")), transformer_engine=WORKS)
        chosen = layer_spec.choose(engine, fields, **given)
        assert chosen.name == ("local" if capability == (9, 0) and is_local else "te"), chosen
        assert ("an H100 trained 32 experts of 1,024 x 768 faster so" in chosen.why) is (chosen.name == "local")


def test_a_resume_has_the_layers_of_its_checkpoint_where_it_can(machine):
    machine(gpu=True, here=H100, transformer_engine=WORKS)

    def chosen(kept, wanted="auto", **keys):
        return spec_for(wanted, kept=kept, **keys).name

    assert chosen("local") == "local" and chosen("local", "te") == chosen("local", attention="fused") == "te"
    assert chosen("local", megatron={"symmetric_ar_type": "two_shot"}) == "te"  # which local layers do not read
    assert chosen("te", "local") == "local"
    machine(gpu=False)
    assert chosen("te") == "local"
