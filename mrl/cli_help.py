"""What the `mrl` command says to help: examples, the keys that a shell completes, the command that another name means."""

from __future__ import annotations

import typing
from collections.abc import Mapping

import click
from click.shell_completion import CompletionItem

from mrl.config.command import all_training, record
from mrl.config.keys import walk

EXAMPLES: Mapping[str, str] = {
    "mrl": """
        mrl sft sft.yaml                     fine-tune
        mrl ppo grpo.yaml                    reinforcement learning: ppo, grpo, ...
        mrl convert import Qwen/Qwen3-0.6B model-mcore
        mrl config ppo rollout               what the keys of a section mean""",
    "mrl sft": """
        mrl sft sft.yaml
        mrl sft sft.yaml train.steps=10 engine.parallel.tp=2 --nproc 4
        mrl sft sft.yaml --dry-run
        torchrun --nproc_per_node 8 -m mrl sft sft.yaml""",
    "mrl ppo": """
        mrl ppo grpo.yaml
        mrl ppo grpo.yaml algorithm.name=ppo critic.engine.backend=fsdp
        mrl ppo grpo.yaml rollout.samples_per_prompt=16 --nproc 8
        mrl ppo grpo.yaml --dry-run""",
    "mrl config": """
        mrl config                           every key of mrl sft
        mrl config ppo                       every key of mrl ppo
        mrl config rollout                   those of a section
        mrl config --grep clip               those whose name or meaning has a text""",
    "mrl convert": """
        mrl convert import path/to/hf-model model-mcore --verify
        mrl convert export runs/demo exported
        mrl convert verify path/to/hf-model model-mcore""",
    "mrl convert import": """
        mrl convert import path/to/hf-model model-mcore --verify
        mrl convert import Qwen/Qwen3-0.6B model-mcore
        mrl convert import model.gguf model-mcore""",
    "mrl convert export": """
        mrl convert export runs/demo exported --verify
        mrl convert export runs/demo/checkpoints/step_00000100 exported --max-shard-size 5GB
        mrl convert export runs/demo-rl critic --role critic""",
    "mrl convert verify": """
        mrl convert verify path/to/hf-model model-mcore
        mrl convert verify path/to/hf-model exported --prompt "2+2=" --json""",
    "mrl slurm": """
        mrl slurm submit sft sft.yaml --nodes 2 --gpus-per-node 8
        mrl slurm status runs/demo
        mrl slurm logs runs/demo -f""",
    "mrl slurm render": """
        mrl slurm render sft sft.yaml --nodes 2 --gpus-per-node 8""",
    "mrl slurm submit": """
        mrl slurm submit sft sft.yaml --nodes 2 --gpus-per-node 8
        mrl slurm submit ppo grpo.yaml train.steps=500 --profile site.yaml""",
    "mrl slurm template": """
        mrl slurm template bare > job.sbatch""",
    "mrl slurm status": """
        mrl slurm status
        mrl slurm status runs/demo""",
    "mrl slurm logs": """
        mrl slurm logs runs/demo -f
        mrl slurm logs 12345 -n 200""",
    "mrl slurm cancel": """
        mrl slurm cancel runs/demo --save""",
}
"""Command -> lines at the end of its --help."""


def add_examples(command: click.Command, path: str) -> None:
    """Puts the examples of `command`, which is called `path`, and of all below it into their help."""
    lines = [line.strip() for line in EXAMPLES[path].strip().splitlines()]
    command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            add_examples(below, f"{path} {name}")


def meant_by(name: str) -> str | None:
    """What to write where `mrl NAME` is no command and another trainer would have one of that name; None where nothing is known."""
    advice = (command.meant_by(name) for command in all_training())
    return next((f"mrl {name}: {text}" for text in advice if text is not None), None)


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the command's config that begin with what was typed; after `KEY=` the choices of the key."""
    keys = {key.path: key for key in walk(record(ctx.params.get("command") or ctx.info_name).root)}
    path, equals, begun = incomplete.partition("=")
    if not equals:
        return [CompletionItem(f"{name}=", help=key.help) for name, key in keys.items() if name.startswith(path)]
    if path not in keys:
        return []
    return [CompletionItem(f"{path}={value}") for value in _choices(keys[path].annotation) if value.startswith(begun)]


def _choices(annotation: typing.Any) -> list[str]:
    """The values that a key takes, where there are few."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return []
    return [choice for arm in typing.get_args(annotation) for choice in _choices(arm)]
