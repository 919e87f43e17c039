"""Has the names of torchvision that vLLM's models of vision import; a server of text calls none of them."""

import enum
import importlib.machinery
import sys
import types

__version__ = "0.28.0"
Modes = enum.Enum("InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"])


class Names(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Modes if name == "InterpolationMode" else type(name, (), {})


for path in (
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
):
    sys.modules[path] = Names(path)
    sys.modules[path].__spec__ = importlib.machinery.ModuleSpec(path, None)
    parent, _, leaf = path.rpartition(".")
    setattr(sys.modules[parent], leaf, sys.modules[path])
