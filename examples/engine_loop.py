"""The engine contract as a program of your own: a loss function, a loader, a loop. Runs on either engine.

    python examples/engine_loop.py                                   megatron, one process
    torchrun --nproc-per-node 2 examples/engine_loop.py megatron 2   megatron, tensor parallel over two
    torchrun --nproc-per-node 2 examples/engine_loop.py fsdp         FSDP2 over two

Every layout prints the same losses.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator

from transformers import Qwen3Config

from mrl.batch import Batch, make_batch
from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
from mrl.engine.registry import build_engine

STEPS, VOCABULARY = 5, 64


def loader(steps: int) -> Iterator[Batch]:
    """Global mini-batches of eight uneven sequences that count upwards; every rank makes the same ones."""
    numbers = random.Random(0)
    for _ in range(steps):
        starts = [(numbers.randrange(VOCABULARY), numbers.randrange(4, 12)) for _ in range(8)]
        sequences = [[(start + i) % VOCABULARY for i in range(length)] for start, length in starts]
        yield make_batch(sequences, [[1.0] * len(sequence) for sequence in sequences])


def loss_fn(data, predictions, ctx):
    """A sum over what counts, never a mean: the engine divides by the tokens of the global mini-batch."""
    return -(predictions["log_probs"] * data.loss_mask).sum(), ctx


def main(backend: str = "megatron", tp: int = 1) -> list[float]:
    """Trains a tiny random model. Returns the losses, the same on every rank."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ).save_pretrained(folder)  # fmt: skip
        engine = build_engine(
            RoleConfig(
                model=ModelConfig(path=folder, init="random", dtype="float32"),
                engine=EngineConfig(backend=backend, parallel=ParallelConfig(tp=tp)),
                optimizer=OptimizerConfig(lr=1e-2, schedule="constant"),
                total_steps=STEPS,
            )
        )
        engine.init_model()
        engine.set_loss_fn(loss_fn)
        ctx = None
        for batch in loader(STEPS):
            engine.optimizer_zero_grad()
            with engine.train_mode():
                predictions, loss, ctx = engine.forward_backward_step(engine.shard_data(batch), ctx)
            grad_norm = engine.optimizer_step()
            lr = engine.lr_scheduler_step()
            if engine.is_main:
                print(
                    f"loss {loss:.6f}  norm {grad_norm:.4f}  lr {lr:g}  {predictions['log_probs'].numel()} log-probs here"
                )
            losses.append(loss)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
