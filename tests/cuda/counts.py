"""Counts the operations that a training step and a decoding step dispatch, on fake CUDA tensors (count_cases.py)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cuda import decoding, run  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case
from tests.cuda.count_cases import RAGGED, Counted, Row
from tests.cuda.operations import Operations

from torch._subclasses.fake_tensor import unset_fake_temporarily  # isort: skip

SEQUENCES = 64


class _Counter:
    """Counts by part of a step. kernels: calls of transformer-engine's. lines: whether lines of code are noted, too."""

    def __init__(self, kernels: Counter[str], lines: bool) -> None:
        self.counted = Counted({}, {})
        self._kernels, self._lines = kernels, lines

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = Counter(self._kernels)
        with Operations(lines=self._lines) as operations:
            yield
        of_te = self._kernels - before
        self.counted.operators[name] = operations.operators + of_te
        self.counted.lines[name] = operations.lines + of_te


def count(row: Row, layers: int, *, lines: bool = False) -> Counted:
    """Returns the operations of each part of a steady step, for a model of so many layers."""
    case, kernels = row.case(layers), Counter[str]()
    if row.te:
        from tests.cuda import te_update

        kernels = te_update.prepare((9, 0)).calls
    counter = _Counter(kernels, lines)
    if row.decodes:
        found = decoding.steps(case, sequences=SEQUENCES, cuda_graphs=row.graphs, lines=lines)
        return Counted({"step": found.operators, "capture": found.captured}, {"step": found.code})
    given = run._Given(case)
    with run.on_one_rank(case, given) as (folder, _):
        engine = _fsdp_engine(folder) if row.spec == "fsdp" else _megatron_engine(case, folder)
        _train(engine, case, given, counter)
    return counter.counted


def _megatron_engine(case: Case, folder: Path) -> Any:
    from mrl.engine.megatron.engine import MegatronEngine
    from tests.cuda import update

    return MegatronEngine(update.config_of(case, folder))


def _fsdp_engine(folder: Path) -> Any:
    from mrl.config.schema import EngineConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, RoleConfig
    from mrl.engine.fsdp import engine, forward, fused, model

    fused.use_kernels = run.on_real_tensors(fused.use_kernels)  # it compares values
    engine.build_mesh = run.on_real_tensors(engine.build_mesh)
    model.compute_local_shape_and_global_offset = run.on_real_tensors(model.compute_local_shape_and_global_offset)
    forward.prepare = run.made_on_the_device(forward.prepare)
    config = EngineConfig(backend="fsdp", device="cuda", micro_batch=MicroBatchConfig(size=1))
    start = ModelConfig(path=str(folder), dtype="bfloat16", init="random")
    return engine.FSDPEngine(RoleConfig(model=start, engine=config, optimizer=OptimizerConfig()))


def _train(engine: Any, case: Case, given: Any, counter: _Counter) -> None:
    """Counts updates of one and two micro-batches, one of ragged rows, and a step of the optimizer, after a whole step."""
    from mrl.algorithms.sft import sft_loss
    from mrl.mcore_models import train_graphs

    engine.init_model()
    engine.set_loss_fn(sft_loss)
    for lengths in (case.lengths, RAGGED) if case.graphs else (case.lengths,):
        _update(engine, given, lengths, 1 + (train_graphs.BEFORE_CAPTURE if case.graphs else 0))
    engine.optimizer_step()
    for name, lengths, micro_batches in (
        ("1 micro-batch", case.lengths, 1), ("2 micro-batches", case.lengths, 2), ("ragged", RAGGED, 1)
    ):  # fmt: skip
        with counter.part(name):
            _update(engine, given, lengths, micro_batches)
    with counter.part("optimizer"):
        engine.optimizer_step()
        engine.lr_scheduler_step()


def _update(engine: Any, given: Any, lengths: Sequence[int], micro_batches: int) -> None:
    """Makes gradients of so many micro-batches of sequences of these lengths."""
    from mrl.batch import make_batch

    with unset_fake_temporarily():
        tokens = [list(range(1, 2 + n)) for n in lengths] * micro_batches  # the last one is a label alone
        batch = make_batch(tokens, [[1.0] * len(t) for t in tokens])
    given.lengths, given.micro_batches, each = lengths * micro_batches, micro_batches, len(lengths)
    engine._plan = lambda _: [[*range(i * each, (i + 1) * each)] for i in range(micro_batches)]
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(batch), {"temperature": 1.0, "last": True})
