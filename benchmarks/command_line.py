"""Types of command-line options: what cannot work is refused in one line before anything runs."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
from collections.abc import Callable

import torch


def at_least(least: int) -> Callable[[str], int]:
    """Returns a type of whole numbers that are not smaller."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: it has to be {least} or more")
        return value

    return read


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it has to be more than 0")
    return value


def folder(text: str) -> pathlib.Path:
    """A folder that is there and that files can be written to."""
    path = pathlib.Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return path


def report(text: str) -> pathlib.Path:
    """A file that can be written, whether or not it is there."""
    path = pathlib.Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    folder(str(path.parent))
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return path


def found_device(parser: argparse.ArgumentParser, device: str) -> str:
    """Returns "cuda" or "cpu": for "auto" what there is."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        parser.error("--device cuda: there is no GPU here that torch can use; --device cpu shows that the script runs")
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    return device
