"""Draws docs/images/architecture.svg, the picture in the README: `make docs` runs it, and a test compares the two.

`python docs/images/architecture.py` prints the picture. Each row of `FLOORS` is a floor of the code, from the top; a module
imports from its own floor and from floors below it (tests/test_floors.py).
"""

from __future__ import annotations

from html import escape

WIDTH, LEFT, GAP, PAD = 1180, 150, 12, 16
BOX_HEIGHT, ROW_GAP, TITLE_HEIGHT = 62, 16, 46
INK, MUTED, PAPER = "#1f2733", "#5b6675", "#ffffff"

# (name of the floor, what it may do), colour, then the boxes: a title and two lines that say what it does.
FLOORS = [
    ("entry", "starts processes", "#dbe7f6", [
        ("mrl sft · ppo · serve", "the runs: local processes,", "torchrun, srun"),
        ("mrl slurm", "a job that starts again", "where it stopped"),
        ("mrl convert · report", "HF and mcore weights;", "runs as a page"),
        ("plan · doctor · check", "a run before it starts:", "fit, machine, layouts"),
        ("mrl generate · eval", "completions, a chat;", "accuracy with intervals"),
    ]),
    ("training", "knows algorithms and mini-batches", "#e4f1dd", [
        ("trainers", "the loop: rollout, train,", "evaluate, save, resume"),
        ("roles + dispatch", "actor, critic, reference,", "reward on shared ranks"),
        ("rollout", "the actor's own engine,", "vLLM, SGLang, environments"),
        ("inference", "a model that is there:", "ask it, score it, measure it"),
        ("serve", "the tinker client's calls:", "promises, order, snapshots"),
    ]),
    ("engine", "knows micro-batches and ranks", "#fbecd2", [
        ("engine: megatron", "Megatron-Core: tp, sp, pp, vpp,", "cp, ep, etp, dp"),
        ("engine: fsdp", "FSDP2 on the transformers model:", "dp, cp (Ulysses), HSDP"),
        ("engine: yours", "a subclass of BaseEngine that", "a package registers"),
    ]),
    ("models", "builds GPTModel", "#f6dfdd", [
        ("mcore_models", "config.json → TransformerConfig,", "layer specs, value head, LoRA"),
    ]),
    ("pure", "no process group", "#ebe2f5", [
        ("algorithms", "losses as sums,", "advantages, KL"),
        ("data", "chat templates,", "masks, packing"),
        ("rewards", "functions in", "worker processes"),
        ("weights", "a file for each family,", "read both ways"),
        ("ops", "attention, the cache of", "keys and values, devices"),
        ("kernels", "Triton, for GPUs;", "one operator each"),
    ]),
    ("words", "no torch.distributed", "#e8ebef", [
        ("config", "typed keys,", "checked before a start"),
        ("batch", "tokens, labels, masks,", "denominators"),
        ("parallel", "degrees and", "coordinates"),
        ("metrics", "one meaning on", "every layout"),
    ]),
]  # fmt: skip


def text(x: float, y: float, words: str, size: int, *, colour: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>'


def box(x: float, y: float, width: float, colour: str, lines: tuple[str, str, str]) -> list[str]:
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="6" fill="{colour}" stroke="{MUTED}"/>',
        text(x + 10, y + 19, lines[0], 14, bold=True),
        text(x + 10, y + 37, lines[1], 12),
        text(x + 10, y + 52, lines[2], 12),
    ]


def svg() -> str:
    """The picture, as the text of an SVG file."""
    height = TITLE_HEIGHT + len(FLOORS) * (BOX_HEIGHT + ROW_GAP) + PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>mrl: floors of the code, each of which imports only from floors below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        text(PAD, 28, "Every rank runs the same short program; a module imports only downwards", 15, colour=MUTED),
    ]
    for row, (name, knows, colour, boxes) in enumerate(FLOORS):
        y = TITLE_HEIGHT + row * (BOX_HEIGHT + ROW_GAP)
        parts.append(text(PAD, y + 24, f"{len(FLOORS) - 1 - row}  {name}", 15, bold=True))
        first, _, rest = knows.partition(" and ")
        parts.append(text(PAD, y + 42, first, 11, colour=MUTED))
        if rest:
            parts.append(text(PAD, y + 56, f"and {rest}", 11, colour=MUTED))
        width = (WIDTH - LEFT - PAD - GAP * (len(boxes) - 1)) / len(boxes)
        for column, lines in enumerate(boxes):
            parts += box(LEFT + column * (width + GAP), y, width, colour, lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(svg(), end="")
