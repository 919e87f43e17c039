"""Maps weight names and tensors between Hugging Face and mcore, in both directions; no process group, no megatron.

`families/` holds one table per family. `rules` makes of it what one rank loads and exports. `safetensors_io` reads and
writes folders, and `accounting` accounts for every name. `streams` has the two functions that another program needs:

    from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.weights.families import family_for
    from mrl.weights.hf_config import read_hf_config
    from mrl.weights.streams import hf_to_mcore, mcore_to_hf

__all__ = ["family_for", "hf_to_mcore", "mcore_to_hf", "read_hf_config"]

_MODULES = {"family_for": "families", "read_hf_config": "hf_config", "hf_to_mcore": "streams", "mcore_to_hf": "streams"}


def __getattr__(name: str) -> Any:
    """Imports a name on demand: these modules load PyTorch, and code that looks at a checkpoint's folder needs none."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
