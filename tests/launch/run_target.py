"""`python run_target.py TARGET OUTPUT_DIR NPROC`: `mrl.launch.local.launch` with the exit codes of `mrl`."""

import sys

import click

from mrl import cli
from mrl.config.load import from_dict
from mrl.launch import local


@click.group(cls=cli._Main)
def main() -> None:
    pass


@main.command()
@click.argument("target")
@click.argument("output_dir")
@click.argument("nproc", type=int)
def run(target: str, output_dir: str, nproc: int) -> None:
    raw = {"output_dir": output_dir, "model": {"path": "m"}, "data": {"train": "d"}, "train": {"global_batch_size": 8}}
    config = from_dict(raw)
    try:
        logs = local.logs_of(config)
        local.launch(f"tests.launch.targets:{target}", config, "mrl sft c.yaml", nproc, log_dir=logs)
    except local.RankFailed as failure:
        sys.exit(f"mrl: {failure}")


if __name__ == "__main__":
    main()
