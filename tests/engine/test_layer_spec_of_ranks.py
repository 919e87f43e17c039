"""All ranks of a model build its layers of the same modules, or none does: nodes may differ in what is installed."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch.distributed as dist

from mrl.config.schema import MoEConfig, RoleConfig
from mrl.errors import ConfigError
from mrl.roles.dispatch import MODEL
from tests.engine import tiny
from tests.engine.contract import everyone
from tests.engine.harness import run_case

ABSENT = "transformer-engine is not installed"


def of_ranks(config: RoleConfig, kinds: list[str]) -> list[str]:
    """Returns what each rank says where rank 1 finds other packages than rank 0, for each kind of difference."""
    from mrl.engine.megatron import engine, model
    from mrl.mcore_models.layer_spec import LayerSpec

    choose, comm = model.layer_spec.choose, model.cp_comm_type
    said = []
    for kind in kinds:

        def other(*given, kind=kind, **options):
            if kind == "error":
                raise ConfigError(
                    "engine.layer_spec", "auto", "finds transformer-engine, which does not load", "mend it"
                )
            return LayerSpec("te", "there is a GPU") if kind in ("spec", "cp") else choose(*given, **options)

        if kind != "none" and (dist.get_rank() == 1 or kind == "cp"):
            model.layer_spec.choose = other
        model.cp_comm_type = lambda *_, kind=kind: "a2a" if kind == "cp" and dist.get_rank() == 1 else "p2p"
        try:
            said.append(engine.MegatronEngine(config).model.spec)
        except ConfigError as error:
            said.append(str(error))
        finally:
            model.layer_spec.choose, model.cp_comm_type = choose, comm
    return everyone(said)


def test_one_that_chooses_otherwise_is_named_by_all(tmp_path):
    config = tiny.role(tiny.make_model(str(tmp_path), "llama"), backend="megatron", parallel={"cp": 2})
    first, second = run_case(2, f"{__name__}:of_ranks", config=config, kinds=["none", "spec", "cp", "error"])
    assert first == second  # nobody waits for a rank that has given up
    alike, spec, cp, error = first
    assert alike == "local"
    assert spec.startswith('engine.layer_spec: value "auto" is local on host ')
    assert "(torch sees no GPU" in spec and " but te with cp_comm_type p2p on host " in spec, spec
    assert spec.endswith("(there is a GPU); install the same packages on all hosts, or set local"), spec
    assert "is te with cp_comm_type p2p on host" in cp and "but te with cp_comm_type a2a on host" in cp, cp
    assert error.endswith("which does not load; mend it"), error


def with_variable(config: RoleConfig, name: str, value: str) -> tuple[str, str | None]:
    """Returns the spec that a model is built of where a variable is in the environment, and the variable then."""
    from mrl.engine.megatron.engine import MegatronEngine

    os.environ[name] = value
    try:
        engine = MegatronEngine(config)
        engine.init_model()
        return engine.model.spec, os.environ.get(name)
    finally:
        del os.environ[name]


def with_attention(config: RoleConfig) -> dict[str, str | None]:
    """Returns the variables where a model of transformer-engine's modules is built."""
    from mrl.engine.megatron.engine import MegatronEngine
    from mrl.mcore_models.te_limits import SWITCHES
    from tests.engine.te_like import te_like

    try:
        with te_like():
            MegatronEngine(config).init_model()
        return {name: os.environ.get(name) for name in SWITCHES}
    finally:
        for name in SWITCHES:
            os.environ.pop(name, None)


def kept(config: RoleConfig, root: str, actor: str) -> list[tuple[str, bool, bool]]:
    """Returns the specs of a run's roles that resumes where the first role, `actor`, was te."""
    from mrl.engine.megatron.engine import MegatronEngine
    from mrl.roles.dispatch import WorkerDispatch
    from tests.engine.te_like import te_like

    def run(spec: str) -> WorkerDispatch:
        engine = dataclasses.replace(config.engine, layer_spec=spec)
        roles = {actor: dataclasses.replace(config, engine=engine)} | ({} if actor == MODEL else {"reward": config})
        return WorkerDispatch({role: MegatronEngine(of) for role, of in roles.items()}, offload_idle=False)

    with te_like():
        first = run("te")
        first.init_model()
        folder = first.save_checkpoint(f"{root}/{actor}", global_step=1, state={"chosen": first.chosen})
        found = []
        for spec in ("auto", "local"):
            resumed = run(spec)
            resumed.keep_choices(folder)
            resumed.init_model()
            resumed.load_checkpoint(folder)
            found += [(e.chosen["layer_spec"], e.setup.thd, e.model.spec == "te") for e in resumed.engines.values()]
        return found


@pytest.mark.parametrize("actor", [MODEL, "actor"])
def test_a_resume_builds_the_layers_that_its_checkpoint_was_trained_with(tmp_path, actor):
    config = tiny.role(tiny.make_model(str(tmp_path), "llama"), backend="megatron")
    te, local = [("te", True, True)], [("local", False, False)]
    reward = [] if actor == MODEL else local
    found = run_case(1, f"{__name__}:kept", config=config, root=str(tmp_path), actor=actor)
    assert found == te + reward + local + reward


def test_a_kernel_that_is_asked_for_leaves_out_the_others(tmp_path):
    folder = tiny.make_model(str(tmp_path), "llama")
    config = tiny.role(folder, backend="megatron", optimizer=None, layer_spec="te", attention="fused")
    expected = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
    assert run_case(1, f"{__name__}:with_attention", config=config) == expected


def test_variables_of_transformer_engine_are_its_own(tmp_path):
    """megatron's GPTModel asserts that they agree with an argument of its own trainer, which mrl has not."""
    config = tiny.role(tiny.make_model(str(tmp_path), "llama"), backend="megatron")
    assert run_case(1, f"{__name__}:with_variable", config=config, name="NVTE_FUSED_ATTN", value="0") == ("local", "0")


def test_a_plan_has_the_layers_that_auto_takes_on_its_gpus(tmp_path):
    from mrl.engine.megatron.meta import layer_spec_on_gpus
    from mrl.parallel import ParallelDims

    folder = tiny.make_model(str(tmp_path), "qwen3_moe", num_experts=32)

    def planned(capability, **keys):
        config = tiny.role(folder, backend="megatron", dtype="bfloat16", **keys)
        return layer_spec_on_gpus(config, ParallelDims(), capability)

    assert planned((9, 0)) == "local" and planned((9, 0), layer_spec="te") == "te"
    assert planned((10, 0)) == planned(None) == planned((9, 0), moe=MoEConfig(grouped_mm=False)) == "te"
