"""Tiny vision-language models with random weights, and the processor files that belong to them.

The tokenizer is that of tests/data/kit.py with the tokens of images; the processor's files are saved as the hub has them.
"""

from __future__ import annotations
