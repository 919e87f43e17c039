"""Computes SplitMix64 (Steele et al., 2014): a bijection of 64-bit words. Every input bit affects every output bit.

Words are int64 tensors with arithmetic that wraps around, or integers from 0 to 2**64 - 1.
"""

from __future__ import annotations

from torch import Tensor

WORD = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
"""The step of the sequence: word `i` from a start is the mix of `start + (i + 1) * GAMMA`."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix_int(z: int) -> int:
    """Returns the mix of one word, from 0 to 2**64 - 1."""
    z = ((z ^ (z >> 30)) * _FIRST) & WORD
    z = ((z ^ (z >> 27)) * _SECOND) & WORD
    return z ^ (z >> 31)


def to_int64(word: int) -> int:
    """Returns the int64 that has the bits of `word`."""
    return word - 2**64 if word >> 63 else word


signed = to_int64  # its older name, for scripts outside of the repository


def mix_in_place(z: Tensor) -> Tensor:
    """Applies `mix_int` to int64 words, in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= to_int64(factor)
    return z
