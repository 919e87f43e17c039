"""What an engine of a check is built from: the run's own keys, but for what no check can have."""

from __future__ import annotations

from mrl.algorithms.sft import sft_loss
from mrl.check import layouts
from mrl.check.reference import Loss
from mrl.check.subject import Subject
from mrl.config.command import Part
from mrl.config.schema import EngineConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig


def test_engines_of_a_layout_communicate_without_userbuffers():
    """Those take neither fp32 nor the micro-batches of a check."""
    further = {"tp_comm_overlap": True, "tp_comm_bulk_dgrad": False, "bucket_size": 5}
    engine = EngineConfig(megatron=further, micro_batch=MicroBatchConfig(tokens=64))
    config = RoleConfig(model=ModelConfig(path="model"), engine=engine, optimizer=OptimizerConfig(lr=1e-3))
    subject = Subject(Part("", config.model, engine), config, sft_loss, "tokens", Loss())
    [layout] = layouts.named("tp2", ParallelConfig())
    made = subject.on(layout, path="cut", init="weights", dtype="float32", micro_batch=MicroBatchConfig(size=2))
    assert made.engine.megatron == {"bucket_size": 5}
