"""`mrl report` on the command line: its table, its JSON, its refusals, and following a run that goes on."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import shutil

import numpy
import pytest
from click.testing import CliRunner

from mrl import cli, metrics
from mrl.commands import report as command
from mrl.errors import UserError
from mrl.report import make, summary
from mrl.report.make import Report, ReportOptions, watch
from mrl.report.page import InitialView
from mrl.report.runs import readers
from mrl.trainers.run_lock import RunLock
from tests.report import made_runs


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_pictures(monkeypatch):
    """They take most of the time, and are tested in test_page.py."""
    monkeypatch.setattr(make, "write_pictures", lambda *given: [])


def mrl(*words: str, ends: int = 0) -> str:
    done = CliRunner().invoke(cli.main, ["report", *words])
    assert done.exit_code == ends, done.output
    return done.stderr if ends else done.stdout


def test_the_table_of_a_run():
    made_runs.make_sft(pathlib.Path("runs/demo"))
    lines = mrl("runs/demo", "--no-page").splitlines()
    assert lines == [
        "runs/demo: step 20 of 20, finished",
        "",
        "metric                 first       last       best  at step",
        "-" * 83,
        "train/loss                 3       0.15       0.15       20  █▄▃▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁",
        "eval/loss                0.4        0.1        0.1       20  █▃▁▁",
        "train/lr               0.001       0.02          -        -  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███",
        "train/grad_norm            2          3          -        -  ▅█▁▅█▁▅█▁▅█▁▅█▁▅█▁▅█",
        "perf/tokens_per_s        201        220        220       20  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███",
        "perf/step_s              0.5        0.5        0.5        1  ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄",
        "perf/memory_gb           1.5        1.5          -        -  ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄",
        "",
        "metrics that only the page has: 1; --all shows them here",
    ]
    assert "train/tokens" in mrl("runs/demo", "--no-page", "--all")
    assert not pathlib.Path("runs/demo/report").exists()


def test_runs_side_by_side_have_one_scale():
    made_runs.make_sft(pathlib.Path("a"), steps=4)
    made_runs.make_sft(pathlib.Path("b"), steps=8, lr=0.5)
    text = mrl("a", "b", "--no-page")
    [loss] = re.findall(r"train/loss\n  a .* (\S+)\n  b .* (\S+)\n", text)
    assert loss == ("█▄▂▂", "█▄▂▂▁▁▁▁")
    assert text.endswith(
        "different (a | b):\n  command: mrl sft a.yaml | mrl sft b.yaml\n  optimizer.lr: 0.001 | 0.5\n"
    )
    made_runs.make_sft(pathlib.Path("c/a"), steps=4)
    assert mrl("a", "c/a", "--no-page").endswith("\nconfigs, versions and git state are the same\n")
    pathlib.Path("b/config.yaml").unlink()
    assert mrl("a", "b", "c/a", "--no-page").endswith("/a, c/a, which have a config.yaml to read\n")
    assert "are the same" not in (text := mrl("a", "b", "--no-page")) and "versions are not compared: fewer" in text


def test_names_cannot_speak_to_the_terminal():
    """Colours, marks of direction, half characters and ends of lines are escaped, as is anything that no terminal has."""
    names = {"a\nb": 1.0, "\u202eb": 2.0, "\x1b[31mc": 3.0, "\ud800": 4.0, "": 5.0}
    run = made_runs.make_run(pathlib.Path("\u202erun"), [])
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **names}) + "\n")
    with open(run / "config.yaml", "a") as file:
        file.write('data: {train: "\\u202e"}\n')
    text = mrl(str(run), str(made_runs.make_sft(pathlib.Path("b"))), "--no-page", "--all")
    assert all(line.isprintable() for line in text.splitlines())
    assert {"a\\nb", "\\u202eb", "\\x1b[31mc", "\\ud800"} <= set(
        text.splitlines()
    ) and "data.train: \\u202e | -" in text


def test_differences_as_json_are_json():
    """YAML has dates."""
    for name, more in (("a", "x: {day: 2020-01-01, flag: 1}"), ("b", "x: {day: 1, flag: true}")):
        run = made_runs.make_sft(pathlib.Path(name))
        with open(run / "config.yaml", "a") as file:
            file.write(more + "\n")
    found = json.loads(mrl("a", "b", "--json", "--no-page"))["config_differences"]
    assert found["x.day"] == {"a": "2020-01-01", "b": 1}
    assert "x.flag" in found, "1 is another value than true"


def test_json():
    made_runs.make_rl(pathlib.Path("a"))
    found = json.loads(mrl("a", "--json", "--no-page"))
    [run] = found.pop("runs")
    assert found == {"config_differences": {}, "version_differences": {}, "page": None}
    assert (run["step"], run["total_steps"], run["state"]) == (12, 12, "finished")
    assert run["versions"]["torch"] == "2.13.0" and run["git"] == "0123abc, clean"
    assert run["metrics"]["reward/mean"] == {
        "values": 12, "first": 0.1, "last": pytest.approx(1.2), "lowest": 0.1, "highest": pytest.approx(1.2),
        "best": pytest.approx(1.2), "best_step": 12,
    }  # fmt: skip
    assert run["metrics"]["actor/entropy"]["best"] is None and len(run["metrics"]) == len(made_runs.rl_row(1)) + 2


def test_sparklines():
    assert summary.sparkline(numpy.array([0.0, numpy.nan, 1.0]), 0, 1) == "▁ █"
    assert summary.sparkline(numpy.array([]), 0, 0) == "" and summary.sparkline(numpy.full(5, 2.0), 2, 2) == "▄▄▄▄▄"
    assert summary.sparkline(numpy.arange(100.0), 0, 99, width=4) == "▁▃▆█"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (12.0, "12"), (1234.5, "1234"), (133402.0, "133,402"), (2.5e-9, "2.5e-09"), (1e20, "1e+20"),
     (float("inf"), "inf"), (-0.123456, "-0.1235")],
)  # fmt: skip
def test_numbers(value, text):
    assert summary.number(value) == text


def test_where_the_page_is(no_pictures):
    made_runs.make_sft(pathlib.Path("a"))
    made_runs.make_sft(pathlib.Path("b"))
    assert mrl("a").endswith("\npage: a/report/index.html  (pictures: a/report/charts/)\n")
    assert "page: a/report/compared/index.html" in mrl("a", "b")
    assert "page: elsewhere/index.html" in mrl("b", "--out", "elsewhere", "--samples", "0")
    assert [path.stat().st_size > 4e6 for path in pathlib.Path().rglob("index.html")] == [True] * 3
    pathlib.Path("file").write_text("")
    assert "file: cannot be written" in mrl("a", "--out", "file", ends=2)


def test_refusals(no_pictures):
    made_runs.make_sft(pathlib.Path("a"))
    made_runs.make_run(pathlib.Path("b"), [(1, {"train/loss": 1.0})])
    for words, says in (
        (["c"], "mrl: c: has no metrics.jsonl with a step; give the output_dir of a run, as in runs/demo, or --watch if it has made no step yet\n"),
        (["a", "--smooth", "1"], "mrl: Invalid value for '--smooth': 1.0 is not in the range 0<=x<=0.9999; see main report --help\n"),
        (["a", "--no-page", "--out", "x"], "mrl: --out: has no effect with --no-page; leave one of them out\n"),
        (["a", "--json", "--watch"], "mrl: --json: is of a report that is made once, not of --watch; leave one of them out\n"),
        (["b", "--x", "tokens"], 'mrl: --x: value "tokens" is in no metrics.jsonl of these runs; give --x step\n'),
        (["a", "--every", "3"], "mrl: --every: has no effect without --watch; give both, or leave it out\n"),
    ):  # fmt: skip
        assert mrl(*words, ends=2) == says
    assert not pathlib.Path("b/report").exists()


def test_every_example_of_the_help_runs(monkeypatch, no_pictures):
    for name in ("demo", "a", "b"):
        made_runs.make_rl(pathlib.Path("runs") / name)
    lines = [re.split(r"  +", line.strip())[0] for line in command.COMMAND.examples.strip().splitlines()]
    assert len(lines) == 4
    for line in lines:
        program, name, *words = shlex.split(line)
        assert (program, name) == ("mrl", "report")
        assert "reward/mean" in mrl(*words)
    assert pathlib.Path("compared/index.html").exists()


class Going:
    """A run that makes steps whenever somebody waits for it."""

    def __init__(self, folder: pathlib.Path, total: int) -> None:
        self.folder, self.lock = made_runs.make_run(folder, [], total=total), RunLock(folder, wait_s=0)
        self.log, self.step, self.total = metrics.MetricsLog(folder / "metrics.jsonl"), 0, total
        self.lock.acquire()

    def sleep(self, seconds: float) -> None:
        assert seconds == 7
        if self.step == self.total:
            self.lock.release()
            return
        self.step += 1
        self.log.write(self.step, made_runs.sft_row(self.step))
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write('{"step": ')  # half of the next line
        size = (self.folder / "metrics.jsonl").stat().st_size
        self.after = lambda: (self.folder / "metrics.jsonl").open("r+").truncate(size - 9)


def test_watching_a_run_to_its_end(tmp_path, no_pictures):
    run = Going(tmp_path / "run", total=3)
    found = readers([str(run.folder)], may_be_empty=True)
    report = Report(found, ReportOptions(tmp_path / "out", InitialView(), 10))
    shown = []

    def show(runs, written):
        page = written.read_text(encoding="utf-8")
        shown.append(
            (runs[0].progress, '"reload_s":7' in page, f'"progress":"{runs[0].progress}"' in page, runs[0].notes)
        )
        if run.step:
            run.after()

    [last] = watch(report, 7, show, run.sleep)
    assert shown == [
        ("step 0 of 3, running", True, True, []), ("step 1 of 3, running", True, True, []),
        ("step 2 of 3, running", True, True, []), ("step 3 of 3, running", True, True, []),
        ("step 3 of 3, finished", True, True, []),
    ]  # fmt: skip
    assert last.progress == "step 3 of 3, finished"
    assert '"reload_s":null' in (tmp_path / "out" / "index.html").read_text(encoding="utf-8"), "the last page stays"


def test_ctrl_c_ends_it_with_a_page_that_stays(monkeypatch, no_pictures):
    made_runs.make_sft(pathlib.Path("a"), steps=5)

    def interrupted(seconds):
        assert '"reload_s":2' in pathlib.Path("a/report/index.html").read_text(encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(make.time, "sleep", interrupted)
    text = mrl("a", "--watch", "--every", "2")
    assert "a: step 5 of 20, not running" in text and "looking every 2 s, Ctrl-C ends it" in text
    assert '"reload_s":null' in pathlib.Path("a/report/index.html").read_text(encoding="utf-8")


def test_a_watched_run_that_begins_anew_and_one_that_is_removed(tmp_path, no_pictures):
    """Its metrics.jsonl goes with its folder, and no page makes that folder again."""
    run = made_runs.make_sft(tmp_path / "run", steps=5)
    found = readers([str(run)], may_be_empty=True)
    report = Report(found, ReportOptions(run / "report", InitialView(), 10))
    steps, waits = (
        [],
        iter(((run / "metrics.jsonl").unlink, lambda: made_runs.make_sft(run, steps=2), lambda: shutil.rmtree(run))),
    )
    with pytest.raises(UserError, match="run: has been removed; give a run that is there"):
        watch(report, 7, lambda runs, written: steps.append(runs[0].last_step), lambda seconds: next(waits)())
    assert steps == [5, 0, 2] and not run.exists()


def test_watching_a_finished_run_is_a_report_of_it(no_pictures):
    made_runs.make_sft(pathlib.Path("a"))
    assert mrl("a", "--watch").endswith("\nfinished\n")
