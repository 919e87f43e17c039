"""The page in a real headless Chromium: no error on its console, curves that are seen, texts of a model that do nothing."""

from __future__ import annotations

import io
import json
import os
import pathlib
import warnings

import matplotlib.image
import numpy
import pytest

from mrl.report.charts import charts_of
from mrl.report.make import Report, ReportOptions
from mrl.report.page import InitialView
from mrl.report.runs import readers
from tests.report import browser as chromium
from tests.report import made_runs

pytestmark = pytest.mark.slow
BLUE, ORANGE = (36, 88, 168), (209, 98, 43)  # of the first two curves, or runs


@pytest.fixture(scope="module")
def browser():
    if chromium.command() is None:
        reason = "Chromium is not here: apt-get install chromium"
        if os.environ.get("MRL_TESTS_NEED_CHROMIUM"):  # .ci/run has installed it
            pytest.fail(reason)
        warnings.warn(f"the tests of the page in a browser are skipped: {reason}", stacklevel=1)  # in every report
        pytest.skip(reason)
    with chromium.running() as found:
        yield found


@pytest.fixture
def tab(browser):
    """A tab, whose console shall say nothing, and which shall ask for nothing but the page."""
    page = browser.page()
    yield page
    assert page.errors == []
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    page.close()


def write(
    folder: pathlib.Path, *runs: pathlib.Path, look: InitialView | None = None, reload_s: int | None = None
) -> pathlib.Path:
    report = Report(
        readers([str(run) for run in runs], may_be_empty=True), ReportOptions(folder, look or InitialView(), 100)
    )
    return report.write(report.runs(), reload_s=reload_s, pictures=False)


def drawn(tab, chart: str) -> list[float]:
    """Scrolls to a chart. The widths of its curves, in pixels."""
    box = f"document.querySelector('[data-chart={json.dumps(chart)}]')"
    tab.js(f"{box}.scrollIntoView({{block: 'center'}})")
    tab.wait(f"{box}.querySelector('.main-svg')")
    return tab.js(
        f"[...{box}.querySelectorAll('.scatterlayer path.js-line, .scatterlayer path.point')].map((p) => p.getBoundingClientRect().width)"
    )


def coloured(tab, chart: str, colour: tuple[int, int, int]) -> int:
    """How many pixels of what is seen of a chart have a colour."""
    drawn(tab, chart)
    left, top, width, height = tab.js(
        f"(() => {{ const b = document.querySelector('[data-chart={json.dumps(chart)}] .plot').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height].map(Math.round); })()"
    )
    image = matplotlib.image.imread(io.BytesIO(tab.screenshot()))[top : top + height, left : left + width, :3]
    return int((numpy.abs(image * 255 - numpy.array(colour)).max(axis=2) < 40).sum())


@pytest.mark.always
def test_every_chart_of_a_run_is_drawn(tab, tmp_path):
    tab.open(write(tmp_path / "out", made_runs.make_rl(tmp_path / "run")))
    charts = tab.js("[...document.querySelectorAll('[data-chart]')].map((node) => node.dataset.chart)")
    [reader] = readers([str(tmp_path / "run")])
    assert charts == [chart.key for chart in charts_of(reader.run().table.curves)]
    for chart in charts:
        widths = drawn(tab, chart)
        assert widths and max(widths) > 3, (chart, widths)
    assert coloured(tab, "reward", BLUE) > 100 and coloured(tab, "reward_by_function", ORANGE) > 100
    assert coloured(tab, "reward", ORANGE) == 0, "one curve is one colour"
    assert tab.js("document.querySelector('#header').innerText").startswith("run\n")


def test_rewards_come_first_constants_have_an_axis_of_their_own_and_the_mode_bar_waits_for_the_mouse(tab, tmp_path):
    rows = [(step, {"train/loss": 2.0 / step, "reward/mean": step / 5, "train/lr": 3e-4}) for step in range(1, 6)]
    tab.open(write(tmp_path / "out", made_runs.make_run(tmp_path / "run", rows)))
    assert tab.js("document.querySelector('[data-chart]').dataset.chart") == "reward"
    drawn(tab, "lr")
    plot = "document.querySelector('[data-chart=lr] .js-plotly-plot')"
    low, high = tab.js(f"{plot}._fullLayout.yaxis.range")
    assert 2e-4 < low < 3e-4 < high < 4e-4
    assert tab.js(f"getComputedStyle({plot}.querySelector('.modebar')).visibility") == "hidden"


def test_runs_of_different_kinds_on_one_axis(tab, tmp_path):
    """The first has no rewards, the second no tokens; one is empty."""
    sft = made_runs.make_sft(tmp_path / "sft")
    rl = made_runs.make_run(
        tmp_path / "rl", [(1, {"reward/mean": 0.1, "train/loss": 1.0}), (2, {"reward/mean": 0.2, "train/loss": 2.0})]
    )
    empty = made_runs.make_run(tmp_path / "empty", [])
    tab.open(write(tmp_path / "out", sft, rl, empty, look=InitialView(smooth=0.995)))
    assert tab.js("document.querySelector('#smooth').nextSibling.textContent") == "0.995"
    assert coloured(tab, "loss", BLUE) > 100 and coloured(tab, "loss", ORANGE) > 50
    assert coloured(tab, "reward", BLUE) == 0 and coloured(tab, "reward", ORANGE) > 50
    tab.js(
        "(() => { const s = document.querySelector('#controls select'); s.value = 'tokens'; s.dispatchEvent(new Event('change')); })()"
    )
    tab.wait("document.querySelector('[data-chart=reward]').innerText.includes('rl has no tokens: not drawn')")
    assert coloured(tab, "loss", BLUE) > 100 and coloured(tab, "loss", ORANGE) == 0
    assert "Differences" in tab.js("document.querySelector('#main').innerText")


def test_what_a_model_wrote_is_text(tab, tmp_path):
    run = made_runs.make_rl(tmp_path / "<img src=x onerror=alert(1)>")
    hostile = made_runs.HOSTILE
    message = [{"role": hostile, "content": hostile}]
    rows = [
        made_runs.sample(0, n, prompt=message, completion=hostile, rewards={hostile: 1.0}, row=hostile)
        for n in range(2)
    ]
    made_runs.write_samples(run, "step_00000005.jsonl", rows)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 13, hostile: 1.0, f"reward/{hostile}/mean": 2.0}) + "\n")
    tab.open(write(tmp_path / "out", run))
    drawn(tab, "reward_by_function")
    tab.js("document.querySelector('#samples').scrollIntoView()")
    colour(tab, "none")
    assert tab.js("window.hacked") is None and tab.js("document.querySelectorAll('img').length") == 0
    shown = tab.js("document.querySelector('.sample').innerText")
    assert "</script><script>window.hacked = 1</script><img src=x" in shown and "U+202E" in shown and "␛[31m" in shown
    assert tab.js("document.querySelectorAll('.sample .odd').length") > 5


def colour(tab, by: str) -> list[str]:
    """Chooses what tokens are coloured by. The colours of those on the page."""
    tab.js(
        "(() => { const s = [...document.querySelectorAll('#samples select')].find((one) => [...one.options].some((o) => o.value === 'none'));"
        f" s.value = '{by}'; s.dispatchEvent(new Event('change')); }})()"
    )
    return tab.js("[...document.querySelectorAll('#samples .token')].map((node) => node.style.backgroundColor)")


def test_samples_are_paged_through_and_coloured(tab, tmp_path):
    run = made_runs.make_rl(tmp_path / "run")
    rows = [made_runs.sample(0, n, reward=n / 4, advantage=0.5, advantages=[0, 0, 1.0, -1.0, 0.5]) for n in range(2)]
    made_runs.write_samples(run, "step_00000005.jsonl", [*rows, made_runs.sample(1, 0)])
    tab.open(write(tmp_path / "out", run))
    assert colour(tab, "log_probs")[1:3] == ["rgba(214, 96, 20, 0.3)", "rgba(214, 96, 20, 0.75)"], "-2 and below -5"
    green, red = "rgba(36, 120, 60, {})", "rgba(190, 40, 60, {})"
    assert colour(tab, "advantage")[:3] == [green.format(0.6), red.format(0.6), green.format(0.3)]
    assert tab.js("document.querySelector('.token').title") == "token 7, log-prob -0.1 (p 0.9048), advantage 1"
    assert tab.js("document.querySelector('#where').innerText") == "1 of 2"
    tab.js("document.querySelector('#next').click()")
    assert tab.js("document.querySelector('#where').innerText") == "2 of 2"
    assert "question 1" in tab.js("document.querySelector('.prompt').innerText")


def test_a_page_that_follows_a_run_stays_as_it_was_set(tab, tmp_path):
    run = made_runs.make_sft(tmp_path / "run", steps=4)
    path = write(tmp_path / "out", run, reload_s=1)
    tab.open(path)
    tab.js("document.querySelector('#log').click()")
    made_runs.make_sft(run, steps=8)
    write(tmp_path / "out", run, reload_s=None)
    tab.await_load(2)
    assert tab.js("document.querySelector('#log').checked"), "what its reader chose is kept"
    assert "step 8 of 20" in tab.js("document.querySelector('#header').innerText")
    assert coloured(tab, "loss", BLUE) > 50
    assert not tab.js("document.querySelector('#follow')"), "the last page loads itself no more"
