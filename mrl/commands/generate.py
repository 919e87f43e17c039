"""`mrl generate`: completions of prompts, a chat, or the log-probs of what rows have."""

from __future__ import annotations

from typing import Any

from mrl.commands import NPROC, OVERRIDES, Argument, Command, Option
from mrl.config.inference import InferenceConfig

MODEL = Argument(name="model", kind="path", metavar="MODEL")
BACKEND = Option(names="--backend", metavar="NAME", help="native (default), vllm or sglang: rollout.backend.")
SAMPLING = (
    Option(names="--max-new-tokens", kind="number", metavar="N", help="Most tokens of a completion; default 512."),
    Option(names="--temperature", kind="fraction", metavar="T", help="Divides the logits; default 1, 0 is --greedy."),
    Option(names="--top-p", kind="fraction", metavar="P", help="Sample from the fewest tokens that reach P."),
    Option(names="--top-k", kind="number", metavar="K", help="Sample from the K most probable tokens."),
    Option(
        names="--min-p",
        kind="fraction",
        metavar="P",
        help="Sample from tokens of at least P of the largest.",
    ),
    Option(names="--stop", metavar="TEXT", several=True, help="A text that ends a completion; may be repeated."),
    Option(names="--seed", kind="number", metavar="N", help="Seed of sampling; default 0."),
)


def generate(
    model: str, overrides: tuple[str, ...], prompt: tuple[str, ...], prompts: str | None, nproc: int | None,
    **given: Any,
) -> int | None:  # fmt: skip
    from mrl.launch import inference

    options = sampling_keys(given)
    return inference.generate(model, overrides, prompts=prompt, file=prompts, nproc=nproc, options=options, **given)


def sampling_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of sampling out of `given`. Returns them by their keys."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    keys: dict[str, Any] = {f"rollout.{name}": given.pop(name) for name in names}
    keys |= {"rollout.stop": given.pop("stop"), "seed": given.pop("seed"), "rollout.backend": given.pop("backend")}
    return keys | {"data.system": given.pop("system"), "rollout.samples_per_prompt": given.pop("samples")}


COMMAND = Command(
    help="""Sample from MODEL: complete prompts, chat on the terminal, or score completions that rows have.

    MODEL is a Hugging Face folder or hub id, a checkpoint, an adapter folder, or the directory of a run. KEY=VALUE sets
    a key of engine, model, rollout or data, with the words of `mrl ppo`.
    """,
    examples="""
        mrl generate runs/demo --prompt "12+30="
        mrl generate runs/demo --greedy < prompt.txt
        mrl generate runs/demo --prompts rows.jsonl --samples 4 --temperature 0.7 --out completions.jsonl
        mrl generate runs/demo --prompts completions.jsonl --score
        mrl generate runs/demo --chat --system "Be brief."
        mrl generate runs/demo/checkpoints/latest --prompt "12+30=" engine.parallel.tp=2 --nproc 2""",
    run=generate,
    root=InferenceConfig,
    params=(
        MODEL,
        OVERRIDES,
        Option(names="--prompt", metavar="TEXT", several=True, help="A prompt; may be repeated. Without one: stdin."),
        Option(
            names="--prompts", kind="path", metavar="FILE",
            help="Rows with a prompt, messages or instruction, as `mrl ppo` reads them.",
        ),
        Option(names="--chat", kind="flag", help="Talk on the terminal; /help there says what it knows."),
        Option(names="--system", metavar="TEXT", help="A system message before every prompt."),
        Option(names="--tools", kind="path", metavar="FILE", help="JSON list of function schemas for the template."),
        Option(names="--score", kind="flag", help="Log-probs of the completions in the rows of --prompts."),
        Option(names="--samples", kind="number", minimum=1, metavar="N", help="Completions of each prompt; default 1."),
        Option(names="--greedy", kind="flag", help="Take the most probable token each time."),
        *SAMPLING,
        Option(
            names="--out", kind="path", metavar="FILE",
            help="Write JSON lines: completion, tokens, log-probs, finish reason; with --score the log-probs.",
        ),
        BACKEND,
        NPROC,
    ),
)  # fmt: skip
