"""Layouts in words, what a config's own layout comes down to, and the engine of a layout."""

from __future__ import annotations

import pytest

from mrl.algorithms.sft import sft_loss
from mrl.check import layouts
from mrl.check.command import Subject
from mrl.check.reference import Loss
from mrl.config.command import Part
from mrl.config.schema import EngineConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
from mrl.errors import UserError


def named(words: str, **own) -> list[str]:
    return [f"{layout} on {layout.processes}" for layout in layouts.parse_layouts(words, ParallelConfig(**own))]


def test_words_are_those_that_layouts_are_described_by():
    assert named("dp1,tp2,pp2xvpp2, cp2 ,ep2xdp4,tp2+spxpp2") == [
        "dp1 on 1",
        "tp2+sp on 2",
        "pp2xvpp2 on 2",
        "cp2 on 2",
        "ep2xdp4 on 4",
        "tp2+spxpp2 on 4",
    ]
    assert named("tp2pp2,tp2xpp2") == ["tp2+spxpp2 on 4"]  # the x may be left out, and one layout runs once
    assert named("tp2", sp=False) == ["tp2 on 2"] and named("tp2+sp,dp2", sp=False) == ["tp2+sp on 2", "dp2 on 2"]
    assert named("ep2") == ["ep2xdp2 on 2"] and named("etp2xdp2") == ["etp2xdp2 on 2"]
    for layout in layouts.parse_layouts("tp2+spxcp2xpp2xvpp2xdp2,ep2xetp2xtp2,etp2", ParallelConfig()):
        assert layouts.parse_layouts(str(layout), ParallelConfig()) == [layout]


@pytest.mark.parametrize("words", ["", "tp", "tp2,", "tp2x", "xtp2", "tp0", "tp2tp2", "pp2+sp", "zz2", "tp2 pp2", "2"])
def test_other_words_are_refused(words):
    with pytest.raises(UserError, match="--layouts: value .* is no layout; write degrees of tp"):
        named(words)


def test_degrees_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match=r"--layouts: needs pp of 2 or more|--layouts: .*vpp"):
        named("vpp2")


def of_config(most: int = 8, fits=lambda layout: True, **own) -> list[str]:
    return list(map(str, layouts.layouts_of_config(ParallelConfig(**own), most=most, fits=fits)))


def test_auto_has_each_axis_alone_and_all_together():
    assert of_config() == ["dp1", "dp2"]
    assert of_config(tp=8, pp=4) == ["dp1", "tp2+sp", "pp2", "dp2", "tp2+spxpp2xdp2"]
    assert of_config(pp=4, vpp=3) == ["dp1", "pp2xvpp2", "dp2", "pp2xvpp2xdp2"]
    assert of_config(tp=2, sp=False) == ["dp1", "tp2", "dp2", "tp2xdp2"]
    assert of_config(ep=8) == ["dp1", "ep2xdp2", "dp2"]
    assert of_config(tp=2, ep=4) == ["dp1", "tp2+sp", "ep2xdp2", "dp2", "tp2+spxep2xdp2"]
    assert of_config(tp=2, ep=4, etp=2) == ["dp1", "tp2+sp", "ep2xdp2", "dp2", "tp2+spxep2xetp2xdp2"]
    assert of_config(etp=4) == ["dp1", "etp2xdp2", "dp2"]


def test_auto_takes_what_fits():
    assert of_config(most=2, tp=8, pp=4) == ["dp1", "tp2+sp", "pp2", "dp2"]
    assert of_config(most=4, tp=8, pp=4, cp=2) == ["dp1", "tp2+sp", "cp2", "pp2", "dp2", "tp2+spxcp2"]
    assert of_config(tp=8, pp=4, cp=2)[-1] == "tp2+spxcp2xpp2"  # dp would make it sixteen processes
    assert of_config(most=1, tp=8) == ["dp1"]
    # nine heads: a degree of six comes down to three
    assert of_config(tp=6, fits=lambda layout: 9 % layout.parallel.tp == 0) == ["dp1", "tp3+sp", "dp2", "tp3+spxdp2"]


def test_engines_of_a_layout_communicate_without_userbuffers():
    """Those take neither fp32 nor the micro-batches of a check."""
    further = {"tp_comm_overlap": True, "tp_comm_bulk_dgrad": False, "bucket_size": 5}
    engine = EngineConfig(megatron=further, micro_batch=MicroBatchConfig(tokens=64))
    config = RoleConfig(model=ModelConfig(path="model"), engine=engine, optimizer=OptimizerConfig(lr=1e-3))
    subject = Subject(Part("", config.model, engine), config, sft_loss, "tokens", Loss())
    [layout] = layouts.parse_layouts("tp2", ParallelConfig())
    made = subject.on(layout, path="cut", init="weights", dtype="float32", micro_batch=MicroBatchConfig(size=2))
    assert made.engine.megatron == {"bucket_size": 5}
