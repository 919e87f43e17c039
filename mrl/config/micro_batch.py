"""Keys of `engine.micro_batch`: how a mini-batch is split."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mrl.config.fields import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    tokens: int | Literal["auto"] | None = key(
        None,
        "most tokens of a micro-batch on one replica, padding included, before cp splits them. Excludes `size`. null: "
        "4096, or the longest sequence that the config allows. auto: as null, but on GPUs what `mrl plan` says fits "
        "and takes the least time, up to 32768 (docs/plan.md)",
        minimum=1,
    )
    size: int | None = key(None, "sequences in a micro-batch; excludes `tokens`", minimum=1)
    pad: bool = key(
        False,
        "pad every micro-batch to `tokens`, so that all have one shape (megatron backend). Padding counts in no loss, "
        "norm or metric. No sequence may be longer, and `tokens` must be a number",
    )

    @property
    def token_limit(self) -> int | None:
        """Returns `tokens`, but None for auto."""
        return None if self.tokens == "auto" else self.tokens
