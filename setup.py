"""Packaging of mrl. constraints-3.11.txt and constraints-3.12.txt have the versions that are known to work together."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "mrl" / "__init__.py").read_text(encoding="utf-8"), re.M)[1]

setup(
    name="mrl",
    version=VERSION,
    description="A trainer for language models built on Megatron-Core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mrl", "mrl.*"]),
    package_data={
        "mrl": ["patches.toml"],
        "mrl.config": ["foreign/*.txt"],
        "mrl.doctor": ["*.json"],
        "mrl.launch.slurm": ["templates/*.sbatch"],
        "mrl.report": ["*.html", "*.css", "*.js"],
    },
    install_requires=[
        "megatron-core>=0.16.1,!=0.17.*,!=0.18.*,<0.20",  # the versions whose functions were read (mrl/patches.toml)
        "torch>=2.13.0a0",  # NVIDIA builds 2.13 under this name (docs/gpu.md); PyPI has no such versions
        "transformers>=5",
        "click>=8.2",
        "wandb>=0.20",
        "datasets>=4",  # `datasets` folders and hub ids
        "filelock>=4.2",  # of runs, conversions and the cache of line positions
        "fsspec",  # remote checkpoints
        "huggingface_hub",
        "jinja2",  # chat templates, job scripts
        "matplotlib>=3.9",  # pictures of `mrl report`
        "numpy",
        "packaging",  # versions of flash-attn, as transformer-engine compares them
        "peft>=0.18",  # LoRA adapters
        "plotly>=6",  # its JavaScript is in the pages of `mrl report`
        "psutil",  # megatron-core's checkpoint writers need it; so does the local launcher
        "pyarrow>=19",  # Parquet, with its type of JSON
        "pyyaml>=6",
        "rich>=13",
        "safetensors>=0.4",
        "tokenizers",  # transformers' own; `mrl report` takes it alone
        "zlib-ng>=1",  # checksums of large files at the speed of memory
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.20.2,<2.21"],  # pip compiles a part of it (docs/gpu.md)
        "math": ["math-verify>=0.9"],  # the reward of the same name
        "serve": ["starlette>=1", "uvicorn>=0.40", "protobuf>=5"],  # `mrl serve`; its clients install tinker
        "tensorboard": ["tensorboard"],
        "vision": ["pillow>=10"],  # images of vision-language models
        "dev": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "hypothesis",
            "tensorboard",
            "math-verify>=0.9",
            "mbridge>=0.15.1",  # the converters are compared with it; it needs einops
            "einops",
            "pillow>=10",
            "starlette>=1",
            "uvicorn>=0.40",
            "tinker>=0.29",  # the clients of `mrl serve`
            "openai>=2",
            "build",
            "mypy",
            "markdown-it-py",  # tools/prose.py reads pages with it
        ],
        "docs": ["mkdocs-material>=9"],
    },
    entry_points={"console_scripts": ["mrl=mrl.cli:command"]},
)
