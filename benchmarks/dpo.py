"""Training on preferences side by side: `mrl dpo`, and TRL's trainers; and the losses of `mrl rm` and of `mrl sft` with a teacher.

    python benchmarks/dpo.py --trl-venv DIR --make-trl-venv               losses step by step, then speed; TRL in a venv made in DIR
    python benchmarks/dpo.py --trl-venv DIR --append benchmarks/results/my-machine.md

Subjects take turns (A B A B ...), each time in fresh processes with one thread. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import measure
import workload
from machine import machine, peer_python, versions

PAIRS_PER_STEP, SHORTEST_PROMPT, LONGEST_PROMPT, SHORTEST, LONGEST = 8, 20, 60, 16, 160
LR = 1e-4
TOLERANCE = 1e-5
"""Relative difference of losses, at every step, above which mrl and TRL did not compute the same."""

NUMBERS = {"beta": 0.1}
TINY = workload.MODEL | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Compared:
    """A loss of both: mrl's `loss` section (`teacher` of `sft`), TRL's trainer and what its config is given.

    rows: the file that both read. other: the model beside the one that is trained, a reference or a teacher. model: what is
    trained.
    """

    loss: dict[str, Any]
    trainer: str
    arguments: dict[str, Any]
    rows: str = "pairs.jsonl"
    batch_size: int = PAIRS_PER_STEP
    other: str | None = "other"
    command: str = "dpo"
    model: str = "model"
    note: str = ""


COMPARED = [
    Compared({"name": "dpo"}, "dpo", {"loss_type": "sigmoid"}),
    Compared({"name": "dpo", "length_normalized": True}, "dpo", {"loss_type": "sigmoid_norm"}, note="TRL: `sigmoid_norm`"),
    Compared(
        {"name": "dpo", "sft_weight": 0.5}, "dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        note="TRL: `loss_type=[sigmoid, sft]`",
    ),
    Compared(
        {"name": "ipo", "length_normalized": True}, "dpo", {"loss_type": "ipo"},
        note="TRL takes means over tokens; without `length_normalized` mrl takes the paper's sums",
    ),
    Compared(
        {"name": "kto"}, "kto", {"loss_type": "kto"}, rows="unpaired.jsonl", batch_size=3,
        note="both give each prompt the answer to another one for the KL; TRL to the one before it in a device's batch, mrl to the next "
        "of the global one: equal in batches of good, bad, good",
    ),
    Compared(
        {"name": "orpo"}, "orpo", {}, rows="one_word.jsonl", other=None,
        note="TRL takes the likelihood of prompts, too, mrl as the paper of answers: of prompts of one token, which nothing predicts, they are one",
    ),
    Compared(
        {"name": "simpo", "beta": 2.0, "gamma": 1.0}, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0},
        other=None, note="TRL: `CPOTrainer`, whose `cpo_alpha` is 1 by default",
    ),
    Compared(
        {"name": "bradley_terry"}, "reward", {}, rows="margins.jsonl", other=None, command="rm", model="classifier",
        note="`margin` in each row of both",
    ),
    Compared(
        {"name": "bradley_terry", "centering": 0.1}, "reward", {"center_rewards_coefficient": 0.1}, other=None, command="rm",
        model="classifier", note="TRL: `center_rewards_coefficient`",
    ),
    *(
        Compared(
            {"loss": name, "top_k": None} | given, "gkd", {"lmbda": 0.0, "beta": beta}, rows="answers.jsonl", other="teacher", command="sft",
            note="TRL: `GKDTrainer` on the rows (`lmbda` 0), which samples at its temperature and compares at 1",
        )
        for name, given, beta in (("forward_kl", {}, 0.0), ("reverse_kl", {}, 1.0), ("jsd", {"beta": 0.3}, 0.3))
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What is timed. cache: the reference's log-probs are computed before the first step, which is not counted."""

    name: str
    cache: bool
    peer: bool = False
    keys: dict[str, Any] = field(default_factory=dict, hash=False)


SUBJECTS = [
    Subject("TRL, fp32, live reference", False, peer=True),
    Subject("mrl, `mrl dpo`, live reference", False),
    Subject("TRL, fp32, cached", True, peer=True),
    Subject("mrl, `mrl dpo`, cached", True),
]


def make_rows(folder: pathlib.Path, *, count: int, seed: int = 0) -> list[int]:
    """Writes the files of rows. Returns each pair's tokens in both sequences, shifted, EOS included."""
    numbers = random.Random(seed)
    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "margins": [], "one_word": [], "unpaired": [], "answers": []}
    sizes = []
    for index in range(count):
        prompt, chosen, rejected = (
            workload.words(numbers.randint(*span), workload.VOCABULARY, numbers)
            for span in ((SHORTEST_PROMPT, LONGEST_PROMPT), (SHORTEST, LONGEST), (SHORTEST, LONGEST))
        )
        texts = {"prompt": " ".join(prompt) + " ", "chosen": " ".join(chosen), "rejected": " ".join(rejected)}
        answer = {"prompt": texts["prompt"], "completion": texts["chosen"]}
        rows["pairs"].append(texts)
        rows["margins"].append(texts | {"margin": index % 4 / 4})
        rows["one_word"].append(texts | {"prompt": prompt[0] + " "})
        rows["unpaired"].append(answer | {"label": index % 3 != 1})
        rows["answers"].append(answer)
        sizes.append(2 * len(prompt) + len(chosen) + len(rejected))
    for name, of in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")
    return sizes


def make_models(folder: pathlib.Path, sizes: dict[str, Any]) -> None:
    """Writes the policy, another model that is its reference, one that is a teacher, and a sequence classifier with the policy's
    body. Rows are strings, so that there is no chat template."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for seed, name in enumerate(("model", "other")):
        shutil.rmtree(folder / name, ignore_errors=True)
        workload.make_model(folder / name, seed, sizes=sizes)
        (folder / name / "chat_template.jinja").unlink()
    # Two random models of these sizes say nearly the same. The divergence would be of the size of its own rounding in TRL's fp32.
    teacher = AutoModelForCausalLM.from_pretrained(folder / "other", dtype="float32")
    teacher.lm_head.weight.data.mul_(20)
    teacher.save_pretrained(folder / "teacher")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype="float32")
    classifier.score.weight.data.normal_(std=0.1)
    classifier.save_pretrained(folder / "classifier")
    for name in ("teacher", "classifier"):
        AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)


def main() -> None:
    arguments = parse()
    peer = peer_python(arguments.trl_venv.absolute(), make=arguments.make_trl_venv)
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        sizes = make_rows(folder, count=arguments.steps * PAIRS_PER_STEP)
        lines = []
        if not arguments.only or arguments.only == "losses":
            make_models(folder, TINY)
            lines += losses(folder, peer)
        if not arguments.only or arguments.only == "speed":
            make_models(folder, workload.MODEL)
            lines += speed(folder, peer, sizes, arguments)
    text = "\n".join([*head(arguments, peer), *lines]) + "\n"
    print("\n" + text)
    if arguments.append is not None:
        with arguments.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=11, help="optimizer steps of a timed run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each subject")
    parser.add_argument("--only", choices=["losses", "speed"], help="one of the two parts")
    parser.add_argument("--trl-venv", type=pathlib.Path, required=True, help="folder of the venv that TRL is in")
    parser.add_argument("--make-trl-venv", action="store_true", help="make that venv first, where it is not there")
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is added to")
    return parser.parse_args()


def head(arguments: argparse.Namespace, peer: str) -> list[str]:
    only = f" --only {arguments.only}" if arguments.only else ""
    command = f"python benchmarks/dpo.py --rounds {arguments.rounds} --steps {arguments.steps} --warmup {arguments.warmup}{only}"
    return [
        f"# Preferences, {datetime.date.today()}", "", f"`{command}`", "", machine(), "",
        versions(sys.executable, ["torch", "transformers", "megatron-core"], "mrl"),
        versions(peer, ["torch", "transformers", "trl", "accelerate"], "TRL"),
    ]  # fmt: skip


def run(peer: str | None, spec: dict[str, Any], folder: pathlib.Path) -> list[dict]:
    """One run of TRL, in the interpreter `peer`, or of mrl."""
    script = "worker_mrl.py" if peer is None else "worker_dpo_trl.py"
    return measure.run_worker(peer or sys.executable, script, spec, nproc=1, folder=folder)


def mrl_spec(folder: pathlib.Path, compared: Compared, *, steps: int, lr: float, cache: bool) -> dict[str, Any]:
    data = {"train": str(folder / compared.rows), "max_length": 512, "shuffle": False}
    keys: dict[str, Any] = {"data": data, "model": {"path": str(folder / compared.model), "dtype": "float32"}}
    beside = {"cache": cache, "model": {"path": str(folder / compared.other)}} if compared.other else {}
    if compared.command == "sft":
        keys["teacher"] = beside | compared.loss
    else:
        keys |= {"loss": compared.loss} | ({"reference": beside} if beside else {})
    return {
        "folder": str(folder), "steps": steps, "lr": lr, "batch_size": compared.batch_size, "micro_tokens": 4096, "data": "command",
        "command": compared.command, "keys": keys,
    }  # fmt: skip


def trl_spec(folder: pathlib.Path, compared: Compared, *, steps: int, lr: float, cache: bool) -> dict[str, Any]:
    arguments = (NUMBERS if compared.command == "dpo" else {}) | {"max_length": 512} | compared.arguments
    if cache:
        arguments |= {"precompute_ref_log_probs": True}
    return {
        "folder": str(folder), "steps": steps, "lr": lr, "batch_size": compared.batch_size, "trainer": compared.trainer,
        "arguments": arguments, "rows": compared.rows, "other": compared.other, "model": compared.model,
    }  # fmt: skip


def losses(folder: pathlib.Path, peer: str) -> Iterable[str]:
    """Three steps of every loss, of the same weights and rows: the first shows losses, the others gradients and updates, too."""
    rows = ["", "## Losses of three steps", "", "| `loss` | first step | largest difference | |", "|---|---|---|---|"]
    for compared in COMPARED:
        (mine,) = run(None, mrl_spec(folder, compared, steps=3, lr=LR, cache=False), folder)
        (other,) = run(peer, trl_spec(folder, compared, steps=3, lr=LR, cache=False), folder)
        pairs = list(zip(mine["losses"], other["losses"], strict=True))
        worst = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
        print(compared.loss, pairs, f"{worst:.1e}", file=sys.stderr)
        if worst > TOLERANCE:
            raise SystemExit(f"{compared.loss}: losses differ by {worst:.1e}: {pairs}")
        rows.append(
            f"| `mrl {compared.command}`: `{json.dumps(compared.loss)}` | {pairs[0][0]:.6f} | {worst:.0e} | {compared.note} |"
        )
    return rows


def speed(folder: pathlib.Path, peer: str, sizes: list[int], arguments: argparse.Namespace) -> Iterable[str]:
    """DPO, with a reference that is another model, live and computed before the first step."""
    tokens = [sum(sizes[i * PAIRS_PER_STEP : (i + 1) * PAIRS_PER_STEP]) for i in range(arguments.steps)]
    runs: dict[str, list[dict]] = {subject.name: [] for subject in SUBJECTS}
    for number in range(arguments.rounds):
        for subject in SUBJECTS:
            make = trl_spec if subject.peer else mrl_spec
            spec = make(folder, COMPARED[0], steps=arguments.steps, lr=LR, cache=subject.cache)
            ranks = run(peer if subject.peer else None, spec, folder)
            found = measure.summary(ranks, tokens_per_step=tokens, warmup=arguments.warmup)
            runs[subject.name].append(found)
            print(f"round {number + 1}: {subject.name}: {found['cpu_s']:.2f} CPU s a step", file=sys.stderr)
    return [*table(runs), *goals(runs)]


def table(runs: dict[str, list[dict]]) -> Iterable[str]:
    yield from ("", f"## DPO: {PAIRS_PER_STEP} uneven pairs a step, 20 M parameters; real tokens counted", "")
    yield "| | CPU s/step | wall s/step | tokens per CPU s | peak MB |"
    yield "|---|---|---|---|---|"
    columns = [("cpu_s", ".2f"), ("wall_s", ".2f"), ("tokens_per_cpu_s", ",.0f"), ("peak_mb", ",.0f")]
    for name, of in runs.items():
        cells = [" / ".join(format(one[key], form) for one in of) for key, form in columns]
        yield f"| {name} | " + " | ".join(cells) + " |"


def goals(runs: dict[str, list[dict]]) -> Iterable[str]:
    def ratio(key: str, which: int) -> float:
        theirs, ours = (runs[SUBJECTS[i].name] for i in (which, which + 1))
        return statistics.mean(one[key] for one in ours) / statistics.mean(one[key] for one in theirs)

    yield from ("", "| mrl / TRL | live reference | cached | goal |", "|---|---|---|---|")
    yield f"| tokens per CPU second | {ratio('tokens_per_cpu_s', 0):.2f} | {ratio('tokens_per_cpu_s', 2):.2f} | at least 1.5 |"
    yield f"| peak memory | {ratio('peak_mb', 0):.2f} | {ratio('peak_mb', 2):.2f} | at most 0.9 |"


if __name__ == "__main__":
    main()
