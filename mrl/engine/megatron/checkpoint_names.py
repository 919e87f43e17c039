"""Names parameters in a checkpoint as under the local layer spec, whatever spec the model is built with.

transformer-engine's modules fuse a norm with the next linear, and its experts are one module. megatron's sharded state
dict gives experts the same names under both specs; norms within a linear are renamed here. So a checkpoint of one spec
resumes under the other, and `mrl convert` reads it without knowing the spec.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from mrl.weights.families import FAMILIES
from mrl.weights.table import as_mtp_entry

_EXTRA = "_extra_state"  # transformer-engine's scales of FP8; a checkpoint without them loads under either spec


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Returns (name under transformer-engine, stored name) of all families; `l` is the layer."""
    patterns = {}
    for family in FAMILIES.values():
        of_layer = (*family.layer, *family.linear, *family.dense, *family.sparse)
        for entry in (*of_layer, *map(as_mtp_entry, of_layer)):
            if entry.te is not None and not entry.of_expert:
                pattern = re.escape(entry.te).replace(re.escape("{l}"), r"(?P<l>\d+)")
                patterns[pattern] = entry.mcore.replace("{l}", r"\g<l>")
    return [(re.compile(pattern), name) for pattern, name in patterns.items()]


def stored_name(key: str) -> str:
    """Returns the name in a checkpoint for `key`, a name under either spec."""
    for pattern, name in _patterns():
        if match := pattern.fullmatch(key):
            return match.expand(name)
    return key


def stored_names(sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chunk's sharded state dict with entries of these names, and without transformer-engine's own state.

    sharded: name in the module -> megatron's ShardedTensor, ShardedTensorFactory or ShardedObject, which are changed.
    """
    kept = {name: entry for name, entry in sharded.items() if _EXTRA not in name}
    for entry in kept.values():
        entry.key = stored_name(entry.key)
    return kept
