"""How often the host waits for a GPU in a step of decoding, and what of it CUDA graphs make, of one rank's CUDA tensors
without memory."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case
from tests.cuda.operations import Operations
from tests.cuda.run import _Given

SEQUENCES, PROMPT, SHORT, LONG = 5, 30, 8, 11


@dataclasses.dataclass(frozen=True)
class Found:
    waits: dict[str, float]  # of a step, by line
    replays: float  # of graphs, in a step
    lines: list[str]  # that are said of captures
    modules: set[str]  # classes of the layers
    operators: Counter[str]  # of all these steps, but for those in graphs (operations.py)
    code: Counter[str]  # their lines
    captured: Counter[str]  # operations in the graphs of a generation

    @property
    def operations(self) -> float:
        """Returns the operations of a step."""
        return self.operators.total() / (LONG - SHORT)


class _Sampling(_Given):
    """Every step chooses token 1."""

    def numbers(self, tensor: torch.Tensor, function: str) -> Any:
        if function == "tolist" and tensor.dim() == 2:  # of HostCopy
            return [[number] * tensor.shape[1] for number in (1.0, -1.0, 1.0)]
        return super().numbers(tensor, function)


def steps(
    case: Case,
    *,
    sequences: int = SEQUENCES,
    cuda_graphs: bool = False,
    te_like: bool = False,
    filters: dict[str, Any] | None = None,
    asks: bool = False,
    lines: bool = False,
) -> Found:
    """What the steps from `SHORT` to `LONG` new tokens take, of which none has a prompt.

    te_like: of modules of plain torch that stand for transformer-engine's. filters: of `SamplingParams`. asks: a layer
    reads a tensor on the host, which no capture takes. lines: of operations are noted.
    """
    fake.join_world(case.rank, case.world)
    from mrl.config.schema import EngineConfig, ModelConfig, ParallelConfig, RoleConfig
    from mrl.engine.megatron.engine import MegatronEngine
    from mrl.engine.requests import GenerateRequest
    from mrl.engine.sampling import SamplingParams
    from mrl.mcore_models import decode_graphs, decoder
    from tests.engine import te_like as modules

    said: list[str] = []
    decode_graphs.logger.warning = lambda text, *of: said.append(text % of)
    if asks:
        attend = decoder._GroupedAttention.__call__
        decoder._GroupedAttention.__call__ = lambda layer, x, *rest: (x.sum().item(), attend(layer, x, *rest))[1]
    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    parallel = ParallelConfig(tp=case.tp, pp=case.pp, ep=case.ep, etp=case.etp, sp=case.sp)
    role = RoleConfig(
        model=ModelConfig(path=str(folder), init="random"),
        engine=EngineConfig(parallel=parallel, layer_spec=case.spec), optimizer=None,
    )  # fmt: skip
    given = _Sampling(case)
    given.experts.install()
    found = []
    with modules.te_like() if te_like else contextlib.nullcontext(), fake.Fake(given) as run:
        engine = MegatronEngine(role)
        engine.init_model()
        assert engine.model.spec == ("te" if case.spec == "te" else "local")
        for new in (SHORT, LONG):
            run.syncs.clear()
            run.replays = 0
            requests = [
                GenerateRequest([3 + i] * PROMPT, new, sampling=SamplingParams(**filters or {}))
                for i in range(sequences)
            ]
            with Operations(lines=lines) as operations:
                completions = engine.generate(requests, cuda_graphs=cuda_graphs)
            assert [len(c.tokens) for c in completions] == [new] * sequences
            found.append((dict(run.syncs), run.replays, operations))
        (first, some, few), (second, more, many) = found
        each = {line: (n - first.get(line, 0)) / (LONG - SHORT) for line, n in second.items()}
        layers = {type(m).__name__ for chunk in engine.model.chunks for m in chunk.decoder.layers.modules()}
        return Found(
            {line: n for line, n in each.items() if n}, (more - some) / (LONG - SHORT),
            said, layers, many.operators - few.operators, many.lines - few.lines,
            many.captured,
        )  # fmt: skip
