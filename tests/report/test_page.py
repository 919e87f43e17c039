"""The page as a file: what it holds, and that nothing of a run can be markup or script in it. In a browser: test_browser.py."""

from __future__ import annotations

import html.parser
import json
import pathlib

import pytest

from mrl.errors import UserError
from mrl.report.make import Report, ReportOptions, check_folder
from mrl.report.page import InitialView, as_script_data, page
from mrl.report.runs import differences_of, readers
from mrl.report.samples import Samples
from tests.report import made_runs
from tests.report.made_runs import HOSTILE


class Elements(html.parser.HTMLParser):
    """The tags of a page, with their attributes and the text in each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = tag, attributes, text + data


def made(*folders: pathlib.Path, look: InitialView | None = None, samples: int = 100) -> tuple[Elements, dict]:
    """The elements of the page of runs, and the data in it."""
    found = readers([str(folder) for folder in folders])
    read = [reader.run() for reader in found]
    of_samples = [Samples([], []) if not samples else SampleReaderOf(folder).read(samples) for folder in folders]
    text = page(read, of_samples, look or InitialView()).decode("utf-8")
    elements = Elements(text)
    [data] = [text for tag, attributes, text in elements.found if attributes.get("id") == "data"]
    return elements, json.loads(data)


def SampleReaderOf(folder):
    from mrl.report.samples import SampleReader

    return SampleReader(folder)


def test_script_data_is_json_that_ends_no_element():
    text = as_script_data({"a": HOSTILE, HOSTILE: [1.5, None, True]})
    assert not set("<>&\u2028\u2029") & set(text) and "\0" not in text
    assert json.loads(text) == {"a": HOSTILE, HOSTILE: [1.5, None, True]}
    with pytest.raises(ValueError):
        as_script_data(float("nan"))  # JSON.parse would refuse all of it


def test_a_page_is_one_file_that_asks_for_nothing(tmp_path):
    elements, _ = made(made_runs.make_rl(tmp_path / "run"))
    tags = [tag for tag, _, _ in elements.found]
    assert tags.count("script") == 3 and not {"link", "img", "iframe", "base", "form"} & set(tags)
    assert not any({"src", "href"} & set(attributes) for _, attributes, _ in elements.found)
    [policy] = [a["content"] for tag, a, _ in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    assert "connect-src" not in policy and "'unsafe-inline'" not in policy.split(";")[1]


def test_hostile_texts_are_data_and_nothing_else(tmp_path):
    """In a prompt, a completion, a role, a label, a metric, a key of the config, and the name of the run."""
    plain, _ = made(made_runs.make_rl(tmp_path / "plain"))
    run = made_runs.make_rl(tmp_path / "<script>alert(1)<b>")
    prompt = [{"role": HOSTILE, "content": HOSTILE, "name": HOSTILE}]
    changes = {"prompt": prompt, "completion": HOSTILE, "rewards": {HOSTILE: 1.0}, "row": HOSTILE, "cut_by": HOSTILE}
    made_runs.write_samples(run, "step_00000005.jsonl", [made_runs.sample(0, 0, **changes)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 13, f"reward/{HOSTILE}/mean": 1.0, HOSTILE: 2.0}) + "\n")
    with open(run / "config.yaml", "a") as file:
        file.write(f"data: {{system: {json.dumps(HOSTILE.replace(chr(0xD83D), ''))}}}\n")
    elements, data = made(run)
    assert [tag for tag, _, _ in elements.found] == [tag for tag, _, _ in plain.found], "the same elements"
    [run_data] = data["runs"]
    assert run_data["name"] == "<script>alert(1)<b>" and HOSTILE in run_data["curves"]
    [shown] = next(file for file in run_data["samples"]["files"] if file["step"] == 5)["samples"]
    assert shown["prompt"] == prompt and shown["completion"] == HOSTILE and shown["rewards"] == {HOSTILE: 1.0}
    assert run_data["keys"]["data.system"] == HOSTILE.replace("\ud83d", "")


def test_curves_name_places_of_the_axes(tmp_path):
    run = made_runs.make_rl(tmp_path / "run")
    _, data = made(run, look=InitialView("tokens", 0.5, 7))
    assert data["look"] == {"axis": "tokens", "smooth": 0.5, "reload_s": 7} and data["axes"] == [
        "step",
        "tokens",
        "seconds",
    ]
    [of_run] = data["runs"]
    curve, axes = of_run["curves"]["reward/mean"], of_run["axes"]
    assert [axes["step"][i] for i in curve["at"]] == list(range(1, 13))
    assert [axes["tokens"][i] for i in curve["at"]] == [64 * i for i in range(1, 13)]
    assert curve["values"] == [0.1 * i for i in range(1, 13)] and curve["count"] == 12
    assert of_run["stacks"]["phases"]["values"]["perf/eval_s"] == [2] + [0] * 12
    assert of_run["progress"] == "step 12 of 12, finished"


def test_a_long_run_is_drawn_in_part_and_the_page_says_so(tmp_path):
    rows = [(step, {"train/loss": 1 / step, "perf/step_s": 1.0, "perf/rollout_s": 0.5}) for step in range(1, 10_001)]
    rows[6000][1]["train/loss"] = 99.0
    _, data = made(made_runs.make_run(tmp_path / "run", rows))
    [of_run] = data["runs"]
    curve = of_run["curves"]["train/loss"]
    steps = [of_run["axes"]["step"][i] for i in curve["at"]]
    assert len(steps) <= 2000 and steps[0] == 1 and steps[-1] == 10_000 and curve["count"] == 10_000
    assert dict(zip(steps, curve["values"], strict=True))[6001] == 99.0 == max(curve["values"])
    assert len(curve["buckets"]["values"]) == 500 and sum(curve["buckets"]["counts"]) == 10_000
    assert of_run["stacks"]["phases"]["each"] == 10
    assert any("3 curves of up to 10,000 values have more than 4,000" in note for note in of_run["notes"])


def test_values_that_are_not_finite_are_gaps(tmp_path):
    run = made_runs.make_sft(tmp_path / "run", steps=3)
    (run / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x": NaN}\n{"step": 3, "x": 1e400}\n')
    _, data = made(run)
    assert data["runs"][0]["curves"]["x"]["values"] == [1, None, None]
    assert data["runs"][0]["notes"] == ["x: not finite in step 2, 3"]


def test_differences_of_runs(tmp_path):
    first = made_runs.make_sft(tmp_path / "a")
    second = made_runs.make_sft(tmp_path / "b", lr=0.5, torch="2.14.0")
    with open(second / "config.yaml", "a") as file:
        file.write("data: {max_length: null}\n")
    _, data = made(first, second)
    assert data["differences"] == {
        "runs": ["a", "b"],
        "none": None,
        "keys": {"optimizer.lr": ["0.001", "0.5"], "data.max_length": ["-", "null"]},
        "versions": {"torch": ["2.13.0", "2.14.0"], "command": ["mrl sft a.yaml", "mrl sft b.yaml"]},
    }
    found = differences_of([reader.run() for reader in readers([str(first), str(second)])])
    assert found.as_json(found.keys) == {"optimizer.lr": {"a": 0.001, "b": 0.5}, "data.max_length": {"b": None}}
    (second / "config.yaml").unlink()
    assert "versions are not compared" in made(first, second)[1]["differences"]["none"]


def test_a_page_is_not_written_over_what_is_none_of_ours(tmp_path):
    run = made_runs.make_sft(tmp_path / "run")
    wanted = ReportOptions(tmp_path / "out", InitialView(), 0)
    report = Report(readers([str(run)]), wanted)
    for _ in range(2):
        report.write(report.runs(), pictures=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html"]
    (tmp_path / "out" / "index.html").write_text("<!DOCTYPE html>\n<p>mine")
    with pytest.raises(
        UserError, match="out/index.html: is there and no report of mrl; give another folder with --out"
    ):
        report.write(report.runs())
    check_folder(tmp_path / "elsewhere")


def pictures(folder: pathlib.Path, *runs: pathlib.Path, look: InitialView | None = None) -> set[str]:
    report = Report(readers([str(run) for run in runs]), ReportOptions(folder, look or InitialView(), 0))
    report.write(report.runs())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "charts").iterdir())
    return {path.stem for path in (folder / "charts").iterdir()}


def test_pictures_are_of_these_runs_alone(tmp_path):
    """Those of an earlier report that no chart has now are gone; files of other names and makers stay."""
    phases = {"perf/step_s": 1.0, "perf/rollout_s": 0.5, "perf/update_s": 0.5}
    first = made_runs.make_run(tmp_path / "a", [(1, {"train/loss": 1.0, **phases}), (2, {"train/loss": 0.5, **phases})])
    second = made_runs.make_run(tmp_path / "b$x_1$", [(1, phases)])
    assert pictures(tmp_path / "out", first, second, look=InitialView("seconds", 0.9)) == {
        "loss",
        "step_s",
        "phases_1",
        "phases_2",
    }
    mine = tmp_path / "out" / "charts" / "loss_of_mine.png"
    mine.write_bytes(b"\x89PNG, and not by mrl")
    assert pictures(tmp_path / "out", second) == {"step_s", "phases", "loss_of_mine"}


@pytest.mark.nightly
def test_pictures_of_every_chart(tmp_path):
    found = pictures(tmp_path / "out", made_runs.make_rl(tmp_path / "run"), look=InitialView("tokens", 0.5))
    assert found == {
        "loss", "reward", "reward_by_function", "reward_std", "accuracy", "kl", "entropy", "clip_fraction", "response_length",
        "logprob_gap", "lr", "grad_norm", "throughput", "phases", "step_s", "memory", "progress", "iteration",
    }  # fmt: skip
