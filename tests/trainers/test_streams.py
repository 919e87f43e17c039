"""Training on rows that are streamed over HTTP: one order on every layout, one process that reads, resumed bitwise."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from mrl.metric_names import is_metric
from tests.data.web import Site, serving
from tests.engine.harness import run_case
from tests.tiers import nightly_but
from tests.trainers import tiny_runs

CASE = "tests.trainers.cases:train"
STEPS = 9  # of 4 rows: 3 of 4 are of the stream, whose 17 rows end in step 6


@pytest.fixture
def site(inputs, tmp_path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    tiny_runs.write_rows(folder / "web.jsonl", [tiny_runs.chat([200 + i] * (1 + i % 3)) for i in range(17)])
    with serving(folder) as made:
        yield made


def config_of(inputs: pathlib.Path, place: pathlib.Path, train: Any, **changes: Any) -> dict[str, Any]:
    config = tiny_runs.make_config(
        inputs, place, train={"steps": STEPS}, checkpoint={"export_hf": False}, **{"seed": 1} | changes
    )
    return config | {"data": {"train": train, "max_length": 64, **changes.get("data", {})}}


def mixed(inputs: pathlib.Path, site: Site, query: str = "") -> list[dict[str, Any]]:
    streamed = {"path": site.url("web.jsonl") + query, "stream": True, "shuffle_buffer": 6, "weight": 0.75}
    return [streamed, {"path": str(inputs / "train.jsonl"), "weight": 0.25}]


def run(world: int, config: dict, **details: Any) -> tuple[str, str, str]:
    return run_case(world, CASE, config=config, **details)


@pytest.mark.slow
def test_a_stream_is_resumed_bitwise_and_one_on_every_layout(inputs, site, tmp_path):
    """Stopped in the middle of a block, on two processes and on one, and gone on with on two."""

    def config(name: str, **parallel: int) -> dict[str, Any]:
        engine = {"backend": "megatron", "parallel": parallel}
        return config_of(inputs, tmp_path / name, mixed(inputs, site), engine=engine)

    lives = {}
    for world in (1, 2):
        site.asked = []
        assert run(world, config(f"live{world}"))[:2] == ("done", "")
        lives[world] = tiny_runs.steps(tmp_path / f"live{world}")
        assert [name for name, _ in site.asked] == ["web.jsonl"] * len(site.asked)
        assert len(site.asked) <= 5, "more than one process reads"  # found, its first rows, and two epochs, one ahead
    for before, after in ((2, 2), (1, 2)):
        name = f"stopped{before}{after}"
        assert run(before, config(name), happening="signals", step=4)[0] == "stopped"
        assert run(after, config(name))[:2] == ("done", "")
        again = tiny_runs.steps(tmp_path / name)
        if before == after:
            assert again == lives[before]
        for one, other in zip(again, lives[1], strict=True):
            assert one == pytest.approx(other, rel=1e-4)
            assert all(one[name] == other[name] for name in one if name.startswith(("data/", "train/tokens")))
    last = lives[1][-1]
    assert (last["data/web/rows"], last["data/web/epochs"], last["data/train/rows"]) == (27, 1, 9)
    assert all(is_metric(name) for name in last)
    assert run(2, config("tp2", tp=2))[:2] == ("done", "")
    for one, other in zip(tiny_runs.steps(tmp_path / "tp2"), lives[1], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.slow
def test_a_source_that_fails_ends_the_run_after_a_save_and_the_run_goes_on(inputs, site, tmp_path):
    """With another signature, which nothing but config.yaml has."""
    assert run(2, config_of(inputs, tmp_path / "live", mixed(inputs, site)))[:2] == ("done", "")
    config = config_of(inputs, tmp_path / "run", mixed(inputs, site, "?signature=first"))
    switch = site.folder / "fails"
    kind, message, _ = run(2, config, happening="source_fails", step=1, switch=str(switch))
    assert kind == "DataError", message
    assert message.startswith(f"data.train: {site.url('web.jsonl')} cannot be read (HTTPError: HTTP Error 503")
    assert message.endswith(": the same command goes on from there") and "are saved in " in message
    switch.unlink()
    config = config_of(inputs, tmp_path / "run", mixed(inputs, site, "?signature=second"))
    kind, _, said = run(2, config)
    assert kind == "done" and "signature" not in said + message and "changed" not in said
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"signature=" in path.read_bytes()] == ["config.yaml"]
    assert (tmp_path / "run" / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert "signature=second" in (tmp_path / "run" / "config.yaml").read_text()
    assert tiny_runs.steps(tmp_path / "run") == tiny_runs.steps(tmp_path / "live")


@pytest.mark.parametrize(("rank", "on_bad_row", "stream"), [(1, "skip", True), (0, "stop", False)])
def test_a_row_that_one_process_cannot_use_ends_all_with_its_line(inputs, site, tmp_path, rank, on_bad_row, stream):
    """With blocks of one row, for each of which the others wait for the process that reads. Skipping the row would not
    help: the batches of the processes would differ."""
    path = site.url("web.jsonl") if stream else str(site.folder / "web.jsonl")
    data = {"stream": stream, "on_bad_row": on_bad_row, **({"shuffle_buffer": 1} if stream else {"shuffle": False})}
    config = config_of(inputs, tmp_path / "run", path, data=data)
    config["train"] = {"steps": STEPS, "global_batch_size": 4}
    kind, message, _ = run(2, config, happening="rank_cannot_read", rank=rank, row=9)
    assert kind == "DataError", message
    differ = f"rank {rank} cannot use this row and rank {1 - rank} can: "
    assert message.startswith(f"{path}:10: no such image here; {differ}"), message
    assert "; steps 1 to 2 are saved in " in message and "on_bad_row" not in message
    assert message.endswith(": if that is put right, the same command goes on from there")
    assert len(tiny_runs.steps(tmp_path / "run")) == 2


def test_a_first_row_that_one_process_cannot_read_ends_all(inputs, site, tmp_path):
    """It tells the format, before any batch is made."""
    config = config_of(inputs, tmp_path / "run", site.url("web.jsonl"), data={"stream": True})
    kind, message, _ = run(2, config, happening="rank_cannot_read", rank=1, row=0, method="_row")
    assert (kind, message.partition(" can: ")[0]) == (
        "DataError",
        f"{site.url('web.jsonl')}:1: no such image here; rank 1 cannot use this row and rank 0",
    )


ANSWERS = [
    ("dpo", "dpo", {"prompt": "{}+1=", "chosen": "{}", "rejected": "1{}"}),
    ("rm", "regression", {"prompt": "{}+1=", "completion": "{}", "score": 0.5}),
]


@pytest.mark.parametrize(("command", "loss", "row"), nightly_but(ANSWERS[:1], ANSWERS))
def test_answers_are_streamed_too(inputs, site, tmp_path, command, loss, row):
    """Equal to the same rows that are not streamed, in the order of the file."""
    rows = [{k: v.format(i) if isinstance(v, str) else v for k, v in row.items()} for i in range(12)]
    tiny_runs.write_rows(site.folder / "rows.jsonl", rows)
    for name, path, stream in (("web", site.url("rows.jsonl"), True), ("file", str(site.folder / "rows.jsonl"), False)):
        data = {"stream": stream, "shuffle": False}
        config = config_of(inputs, tmp_path / name, path, data=data) | {"loss": {"name": loss}}
        config["train"] = {"steps": 4, "global_batch_size": 4}
        assert run_case(1, f"tests.trainers.{command}_cases:train", config=config)[:2] == ("done", "")
    assert tiny_runs.steps(tmp_path / "web") == tiny_runs.steps(tmp_path / "file")
