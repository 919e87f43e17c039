"""Rows that are read while training, over HTTP and from files: their order against an oracle of its own, going on from
every position without what is before its block, broken connections, and what is said of wrong ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import pathlib
import re
import time
from concurrent.futures import wait

import datasets
import fsspec
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mrl.data import remote
from mrl.data.batches import BatchSource
from mrl.errors import CheckpointError, DataError
from tests.data import test_mixture
from tests.data.hub import serving_hub
from tests.data.test_batches import check_resume, same, state_of
from tests.data.web import Site, serving

WORDS = ["fox", "dog", "the quick brown fox", "lazy", "4", "What is 2 + 2?"]
SIZES = {"a": 23, "b": 9, "c": 31}
FORMS = [".jsonl", ".jsonl.gz", ".json.zst", ".parquet"]


def text(name: str, row: int) -> str:
    return f"{name}{row} {WORDS[row % 6]}"


def write(path: pathlib.Path, rows: list[dict]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as out:
            out.write(lines)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Three files of each form, whose rows say what they are."""
    made = tmp_path_factory.mktemp("streamed")
    for form in FORMS:
        for name, size in SIZES.items():
            write(made / f"{name}{form}", [{"text": text(name, row)} for row in range(size)])
    return made


@pytest.fixture
def site(folder) -> Site:
    with serving(folder) as made:
        yield made


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(remote, "WAITS_S", (0, 0, 0))
    monkeypatch.setattr(remote, "WAITS_TO_FIND_S", (0,))


def source(train, **keys) -> BatchSource:
    return test_mixture.source(train, **{"stream": True} | keys)


def taken(made: BatchSource, batches: int) -> list[str]:
    """File and line or row of what the next batches hold, without the folder."""
    return [place.rpartition("/")[2] for _ in range(batches) for place in (made.next(), made.taken_from())[1]]


def permutation(seed: int, what: str, epoch: int, count: int) -> list[int]:
    """What docs/data-streams.md says that an order is."""
    number = (seed + int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big")) % 2**64
    bits = np.random.Philox(key=np.array([number, epoch], dtype=np.uint64)).random_raw(count)
    return sorted(range(count), key=lambda i: (bits[i], i))


def expected(form: str, names: str, buffer: int, count: int, *, seed: int = 0, of: str = "") -> list[str]:
    """The first `count` rows of a stream of whole files, as `taken` has them."""
    found, epoch = [], 0
    while len(found) < count:
        files = permutation(seed, f"{of}files", epoch, len(names)) if buffer else range(len(names))
        first, shown = (0, ":row ") if form == ".parquet" else (1, ":")
        rows = [f"{names[i]}{form}{shown}{row + first}" for i in files for row in range(SIZES[names[i]])]
        for number, start in enumerate(range(0, len(rows), buffer or len(rows))):
            block = rows[start : start + (buffer or len(rows))]
            order = permutation(seed, f"{of}block {number}", epoch, len(block)) if buffer else range(len(block))
            found += [block[i] for i in order]
        epoch += 1
    return found[:count]


@pytest.mark.parametrize("form", FORMS)
def test_the_order_is_that_of_the_oracle_in_every_form_and_place(form, folder, site):
    for buffer in (0, 10, 1000):
        of_url = source(site.url(f"c{form}"), shuffle_buffer=buffer)
        assert taken(of_url, 20) == expected(form, "c", buffer, 80)
        of_files = source(str(folder / f"*{form}"), shuffle_buffer=buffer, seed=3)
        assert taken(of_files, 40) == expected(form, "abc", buffer, 160, seed=3)
    assert taken(source(site.url(f"c{form}"), shuffle=False), 20) == expected(form, "c", 0, 80)


@pytest.mark.parametrize(("form", "prefetch"), [(".jsonl", True), (".jsonl.gz", False), (".parquet", False)])
def test_a_stream_goes_on_exactly_from_every_position(form, prefetch, folder):
    def make() -> BatchSource:
        return source(str(folder / f"*{form}"), shuffle_buffer=10, prefetch=prefetch, size=3)

    live = make()
    batches, states = [], [state_of(live)]
    for _ in range(48):  # 63 rows are 6 blocks and a short one, so that blocks and epochs end within batches
        batches.append(live.next())
        states.append(state_of(live))
    live.close()
    assert states[-1]["epoch"] == 2
    for start in range(0, 46, 1 if form == ".jsonl" else 5):
        check_resume(make(), states[start], batches[start : start + 2], states[start + 2])


def test_going_on_reads_nothing_before_the_block(tmp_path, site):
    site.folder = tmp_path
    rng = np.random.default_rng(0)
    rows = [{"text": f"fox {i}", "unread": rng.bytes(600).hex()} for i in range(4000)]
    write(tmp_path / "long.jsonl", rows)
    table = pa.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "long.parquet", row_group_size=1000, compression="none")
    for name in ("long.jsonl", "long.parquet"):
        make = lambda: source(site.url(name), shuffle_buffer=100, size=50)  # noqa: B023, E731
        first = make()
        first_batches = [first.next() for _ in range(67)]
        state = first.state_dict()
        assert state["position"] == 67 * 50 and state["mark"][1] == 3300
        first.close()
        resumed = make()
        resumed.load_state_dict(state)
        size = (tmp_path / name).stat().st_size
        site.asked, site.sent = [], 0
        again = resumed.next()
        resumed.close()
        assert again.num_tokens and not any(same(again, batch) for batch in first_batches)
        first_bytes = [start for _, start in site.asked]
        if name == "long.jsonl":
            assert first_bytes == [state["mark"][2]] and state["mark"][2] > 0.8 * size
        else:  # head, footer, and the last of its four row groups
            assert max(first_bytes) > 0.7 * size and site.sent < 0.6 * size


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_opened_again_where_they_broke(site, ranges):
    site.ranges = ranges
    for form in (".jsonl", ".jsonl.gz"):
        size = (site.folder / f"c{form}").stat().st_size
        site.asked = []  # without ranges, each answer begins with the file
        site.breaks_after = 50 if ranges else [None, size // 3, size * 2 // 3]
        made = source(site.url(f"c{form}"), shuffle_buffer=10, format="text")
        assert taken(made, 20) == expected(form, "c", 10, 80)
        starts = [start for _, start in site.asked]
        assert starts[:5] == ([0, 0, 50, 100, 150] if ranges else [0] * 5), starts
    with pytest.raises(DataError, match="^data.train: http.*c.jsonl cannot be read .ConnectionError: .*start the same"):
        site.breaks_after = 0
        source(site.url("c.jsonl")).next()


def test_a_run_that_ends_waits_for_no_source(site, monkeypatch):
    monkeypatch.setattr(remote, "WAITS_S", (600,))
    made = source(site.url("c.jsonl"), shuffle_buffer=0, size=31, prefetch=True)
    made.next()
    site.fails = 503
    while wait([made._ahead], timeout=1).done:  # what was read before it failed
        made.next()
    began_s = time.monotonic()
    assert made.next_error(lambda: True) is None
    made.close()
    assert time.monotonic() - began_s < 60
    assert made.next_error().why.startswith(site.url("c.jsonl"))


def test_a_file_that_is_replaced_is_not_gone_on_with(site):
    site.breaks_after = 50
    made = source(site.url("c.jsonl"), shuffle_buffer=0, size=4)
    made.next()
    file = site.folder / "c.jsonl"
    file.write_bytes(file.read_bytes().replace(b"c", b"d", 1))
    with pytest.raises(DataError, match=r"c.jsonl cannot be read \(ValueError: the file was replaced since"):
        for _ in range(99):
            made.next()


def mixture(folder: pathlib.Path, **streamed) -> list[dict]:
    streamed = {"stream": True, "shuffle_buffer": 5, "weight": 0.75, "name": "web"} | streamed
    return [{"path": str(folder / "*.jsonl"), **streamed}, {"path": str(folder / "b.jsonl"), "weight": 0.25}]


def test_a_streamed_source_is_mixed_with_one_of_files_and_goes_on_exactly(folder):
    entries = mixture(folder)
    live = source(entries, stream=False)
    order, batches, states = [], [], [state_of(live)]
    for _ in range(50):
        batches.append(live.next())
        numbers = [live.dataset.find(row)[0] for row in live.rows]
        order += [(number, place.rpartition("/")[2]) for number, place in zip(numbers, live.taken_from(), strict=True)]
        states.append(state_of(live))
    assert [number for number, _ in order[:8]] == [0, 1, 0, 0] * 2
    of_stream = [place for number, place in order if number == 0]
    assert of_stream == expected(".jsonl", "abc", 5, 150, of="web/") and live.metrics["data/web/epochs"] == 2
    assert sorted(place for number, place in order if number)[::6] == [f"b.jsonl:{i}" for i in range(1, 10)][:9]
    for start in range(0, 50, 3):
        resumed = source(entries, stream=False)
        check_resume(resumed, states[start], batches[start : start + 2], states[min(start + 2, 50)])


def test_passes_over_a_streamed_source_end(folder):
    made = source(mixture(folder, epochs=1), stream=False)
    order = []
    for _ in range(40):
        made.next()
        order += [(made.dataset.find(row)[0], made.dataset.where(row).rpartition("/")[2]) for row in made.rows]
    assert [place for number, place in order if number == 0] == expected(".jsonl", "abc", 5, 63, of="web/")
    assert all(number == 1 for number, _ in order[63 + 21 :])
    assert made.metrics["data/web/rows"] == 63 and made.metrics["data/web/epochs"] == 1
    entries = mixture(folder, epochs=1)
    entries[1]["epochs"] = 1
    made = source(entries, stream=False, size=8)
    assert len(taken(made, 9)) == 72
    with pytest.raises(DataError, match=r"^data.train: every source has given the passes"):
        made.next()


def test_nothing_is_read_ahead_after_the_last_pass(folder, site):
    entries = mixture(folder, path=site.url("c.jsonl"), epochs=1)
    made = source(entries, stream=False, format="text")
    assert len(taken(made, 40)) == 160
    assert site.asked == [("c.jsonl", 0)] * 2  # it was found, and read


@pytest.mark.parametrize("form", [".jsonl.gz", ".json.zst", ".parquet"])
def test_a_damaged_file_is_a_bad_row_after_which_the_next_file_comes(form, tmp_path):
    rng = np.random.default_rng(0)
    for name in "abc":
        rows = [{"text": text(name, row), "unread": rng.bytes(1000).hex()} for row in range(300)]
        write(tmp_path / f"{name}{form}", rows)
    bad = tmp_path / f"b{form}"
    content = bytearray(bad.read_bytes())
    middle = len(content) // 2
    if form == ".parquet":
        content[middle : middle + 2000] = bytes(2000)
    bad.write_bytes(content if form == ".parquet" else content[:middle])

    def make(**keys) -> BatchSource:
        return source(str(tmp_path / f"*{form}"), size=20, format="text", **{"shuffle_buffer": 70} | keys)

    with pytest.raises(DataError) as refused:
        taken(make(shuffle_buffer=0), 45)
    assert refused.value.may_be_skipped and f"{bad}:" in str(refused.value) and "from here on (" in str(refused.value)
    live, order, batches, states = make(on_bad_row="skip"), [], [], []
    while live.state_dict()["epoch"] < 2:
        states.append(state_of(live))
        batches.append(live.next())
        order += [place.rpartition("/")[2] for place in live.taken_from()]
    states.append(state_of(live))
    first = sorted(set(order), key=order.index)
    numbers = [sorted(int(re.search(r"\d+$", one)[0]) for one in first if one.startswith(name)) for name in "abc"]
    start = 0 if form == ".parquet" else 1
    assert numbers[0] == numbers[2] == [*range(start, start + 300)]
    assert numbers[1] == [*range(start, start + len(numbers[1]))] and 20 < len(numbers[1]) < 200
    notes = live.take_notes()
    assert live.counts["skipped"] == len(notes) == 2
    assert all(f"b{form}:" in note and "from here on" in note for note in notes)
    for at in range(0, len(batches) - 1, 7):
        check_resume(make(on_bad_row="skip"), states[at], batches[at : at + 2], states[at + 2])
    for name in "ac":
        (tmp_path / f"{name}{form}").unlink()
    bad.write_bytes(b"no")
    with pytest.raises(DataError, match=rf"b{form}:.* cannot be .* from here on"):
        make(on_bad_row="skip").next()


def test_a_resume_with_another_stream_is_refused(folder, tmp_path):
    made = source(mixture(folder), stream=False)
    made.next()
    state = made.state_dict()
    other = tmp_path / "c.jsonl"
    write(other, [{"text": "other"}] * 31)
    plain = {"stream": False, "shuffle_buffer": None}
    for entries, says in (
        (mixture(folder, shuffle_buffer=6), "data.train, source web, shuffle_buffer: is 6 and was 5 when"),
        (mixture(folder, **plain), "data.train, source web, stream: is null and was true when"),
        (mixture(tmp_path), "data.train, source web: has 1 files and had 3 when"),
    ):
        entries[1]["path"] = str(folder / "b.jsonl")
        with pytest.raises(CheckpointError) as refused:
            source(entries, stream=False).load_state_dict(state)
        assert str(refused.value).startswith(says)
    plain = source(str(folder / "c.jsonl"))
    plain.next()
    with pytest.raises(CheckpointError, match=r"^data.train: .*c.jsonl has size \d+ and had \d+ when"):
        source(str(other)).load_state_dict(plain.state_dict())


def test_the_hub_is_read_at_the_commit_that_it_was_at(folder, monkeypatch):
    files = {f"data/{name}.jsonl": (folder / f"{name}.jsonl").read_bytes() for name in "abc"}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    path = "hf://datasets/someone/rows"
    with serving_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        first = hub.push(files)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        made = source(f"{path}/data/*.jsonl", shuffle_buffer=10)
        order = taken(made, 3)
        hub.push({"data/a.jsonl": b'{"text": "pushed"}\n'})
        order += taken(made, 30)
        assert order == expected(".jsonl", "abc", 10, 132)
        state = state_of(made)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        with pytest.raises(CheckpointError) as refused:
            source(f"{path}/data/*.jsonl", shuffle_buffer=10).load_state_dict(state)
        said = f"has 1 files and had 3 when the checkpoint was saved, .* the run has read {path}@{first}/data/a.jsonl"
        assert re.search(said, str(refused.value)), refused.value
        hub.asked = []
        for name in "abc":
            (file,) = remote.find_files(f"{path}@{first}/data/{name}.jsonl", split=None, key="data.train")
            assert file.name == f"{path}@{first}/data/{name}.jsonl"
        of_commit = [asked for asked in hub.asked if asked.endswith(f"/revision/{first}")]
        assert len(of_commit) == 1, "the commit of each file is asked for again"
        resumed = source(f"{path}@{first}/data/*.jsonl", shuffle_buffer=10)
        resumed.load_state_dict(state)
        assert same(resumed.next(), made.next())
    huggingface_hub.HfFileSystem.clear_instance_cache()


def test_bad_and_long_rows_are_named_and_counted(tmp_path, site):
    site.folder = tmp_path
    lines = [json.dumps({"text": f"fox {i}"}) for i in range(6)]
    lines[2:2] = ["", "{not", json.dumps({"text": "fox " * 50}), json.dumps({"text": ""}), "[1]"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    keys = {"size": 1, "shuffle": False, "max_length": 16}
    for line, skips in ((4, {}), (5, {"on_bad_row": "skip"})):
        made = source(site.url("rows.jsonl?token=secret"), **keys, **skips)
        with pytest.raises(DataError) as refused:
            taken(made, 9)
        assert str(refused.value).startswith(f"{site.url('rows.jsonl')}:{line}: ") and "secret" not in str(
            refused.value
        )
    made = source(site.url("rows.jsonl"), on_bad_row="skip", truncation="drop", **keys)
    assert taken(made, 7) == [f"rows.jsonl:{line}" for line in (1, 2, 8, 9, 10, 11, 1)]
    assert made.counts == {"skipped": 3, "dropped": 1, "truncated": 0}
    assert [note.partition("rows.jsonl:")[2][:2] for note in made.take_notes()] == ["4:", "5:", "6:", "7:"]


def test_nothing_but_bad_rows_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("mrl.data.stream.MAX_SKIPPED_IN_A_ROW", 50)
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n' * 9)
    made = source(str(tmp_path / "bad.jsonl"), on_bad_row="skip")
    with pytest.raises(DataError, match=r"bad.jsonl: none of its streamed rows can be used; .*bad.jsonl:\d+: "):
        made.next()


def test_files_that_cannot_be_streamed_are_refused(folder, site, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fox"}\n' * 999)[:40])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "rows.csv").write_text("text\nfox\n")
    datasets.Dataset.from_list([{"text": "fox"}]).save_to_disk(str(tmp_path / "saved"))
    site.folder = tmp_path
    in_order = {"shuffle_buffer": 0}
    for path, keys, says in (
        (str(tmp_path / "*.jsonl.gz"), {}, "cannot be decompressed"),
        (str(tmp_path / "bad.parquet"), {}, "cannot be read as Parquet"),
        (str(tmp_path / "empty.jsonl"), in_order, "has no rows; at least one row"),
        (str(tmp_path / "no*.jsonl"), {}, "there is no data file"),
        (str(tmp_path / "saved"), {}, "is a saved data set"),
        (str(folder / "a.jsonl"), {"split": "train"}, "which have no splits"),
        (site.url("nowhere.jsonl"), {}, "cannot be read (HTTPError: HTTP Error 404: Not Found); check the address"),
        (site.url("rows.csv"), {}, "is of no form that can be streamed; give files that end in .jsonl"),
        (site.url("empty.jsonl"), {"split": "x"}, "names files, which have no splits"),
        ("http://127.0.0.1:9/a.jsonl", {}, "cannot be read (URLError"),
        ("nosuch://host/a.jsonl", {}, "is of no file system that fsspec has here"),
        ("memory://nowhere/*.jsonl", {}, "no file matches"),
        ("memory://nowhere/a.jsonl", {}, "cannot be read (FileNotFoundError"),
        ("hf://datasets/nobody/nothing/a.jsonl", {}, "hf://datasets/nobody/nothing/a.jsonl cannot be read ("),
        ("nobody/nothing", {}, "datasets cannot find it as a hub id"),
    ):
        with pytest.raises(DataError) as refused:
            source(path, **keys).next()
        assert says in str(refused.value), (path, str(refused.value))
        assert str(refused.value).startswith(("data.", str(tmp_path))), (path, str(refused.value))
        assert "\n" not in str(refused.value)
    for url, says in (("http://user:word@host/a.jsonl", "host/a.jsonl is no address"), ("http://h/a b.jsonl", "is no")):
        with pytest.raises(DataError, match=says) as refused:
            source(url)
        assert "word" not in str(refused.value)
    site.fails = 403
    with pytest.raises(
        DataError, match=r"a.jsonl cannot be read \(HTTPError: .*403.*; check the address \(a signed one"
    ):
        source(site.url("a.jsonl?signature=old"))


def test_other_file_systems_and_the_files_of_a_hub_id(tmp_path, folder):
    memory = fsspec.filesystem("memory")
    for name in "abc":
        memory.pipe(f"/rows/{name}.jsonl.gz", (folder / f"{name}.jsonl.gz").read_bytes())
    for path in ("memory://rows/*.jsonl.gz", "memory://rows"):
        assert taken(source(path, shuffle_buffer=10), 30) == expected(".jsonl.gz", "abc", 10, 120)
    for name, split in (("a", "train"), ("b", "train2"), ("c", "test")):  # as `datasets` finds splits of a repository
        write(tmp_path / f"{split}.parquet", [{"text": text(name, row)} for row in range(SIZES[name])])
    found = remote.find_files(str(tmp_path), split="test", key="data.train")
    assert [file.url for file in found] == [str(tmp_path / "test.parquet")]
    with pytest.raises(DataError, match="has no files of a split more; it has train, test; set split to one of them"):
        remote.find_files(str(tmp_path), split="more", key="data.train")


# -------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "text",
    [
        "403 Client Error: Forbidden for url: https://cdn/a.jsonl?Signature=secret,secret (Request ID: 1)",
        "Max retries exceeded with url: /a.jsonl?Signature=secret&Key=secret (Caused by Request ID: 1)",
        "404, message='Not Found', url='https://host/a.jsonl?secret' Request ID: 1",
    ],
)
def test_what_libraries_say_is_shown_without_signatures(text):
    said = str(remote.read_failure("data.train", "hf://datasets/a/b/a.jsonl", OSError(text)))
    assert "secret" not in said and "a.jsonl?(hidden)" in said and "Request ID: 1" in said


def test_a_signature_that_is_refused_is_not_shown(monkeypatch):
    """Python quotes the address without its host."""
    monkeypatch.setattr(remote, "WAITS_TO_FIND_S", ())
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(InvalidURL: ") as refused:
        remote.find_files("http://127.0.0.1:9/a.jsonl?se\x01cret", split=None, key="data.train")
    assert "cret" not in str(refused.value)
