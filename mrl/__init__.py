"""mrl: a trainer for language models built on Megatron-Core."""

__version__ = "0.1.0.dev0"
