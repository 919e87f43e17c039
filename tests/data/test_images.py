"""Rows with images: every way to name one gives the same picture, in the model's own tokens; what is wrong is said in one line."""

import json
from urllib.parse import quote

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from mrl.data.batches import BatchSource
from mrl.data.dataset import RejectedRow, SFTDataset
from mrl.errors import DataError
from tests.data.pictures import make_vision, picture, png, png_text
from tests.data.tiny_tokenizers import config, make_tokenizer, trained_text, write_jsonl

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return make_vision(tmp_path_factory.mktemp("model"))


def text(words):
    return {"type": "text", "text": words}


def row(*parts, answer="The answer is 4.", **fields):
    """A question whose content is `parts`, and its answer."""
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}], **fields}


def load(reader, path, index=0, **keys):
    tokenizer, vision = reader
    return SFTDataset(config(path, **keys), tokenizer, vision=vision).load(index)


def refused(reader, path, **keys):
    with pytest.raises(DataError) as caught:
        load(reader, path, **keys)
    message = str(caught.value)
    assert message.count("\n") == 0 and message.startswith(f"{path}:"), message
    return message


def same(a, b):
    return a.ids == b.ids and a.multi_modal_inputs.keys() == b.multi_modal_inputs.keys() and all(
        torch.equal(a.multi_modal_inputs[name], b.multi_modal_inputs[name]) for name in a.multi_modal_inputs
    )  # fmt: skip


def test_tokens_and_inputs_are_those_of_the_models_own_processor(reader, tmp_path):
    tokenizer, vision = reader
    for i, size in enumerate(((20, 12), (40, 40))):
        picture(i, *size).save(tmp_path / f"{i}.png")
    parts = ({**IMAGE, "path": "0.png"}, text("What is "), {**IMAGE, "path": "1.png"}, text("?"))
    example = load(reader, write_jsonl(tmp_path / "a.jsonl", [row(*parts)]))
    content = [{**p, "image": picture(0)} if p.get("path") == "0.png" else p for p in parts]
    content = [{**p, "image": picture(1, 40, 40)} if p.get("path") == "1.png" else p for p in content]
    content = [{k: v for k, v in p.items() if k != "path"} for p in content]
    whole = vision._processor.apply_chat_template(
        row(*content)["messages"], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert example.ids == whole["input_ids"][0].tolist()
    assert torch.equal(example.multi_modal_inputs["pixel_values"], whole["pixel_values"])
    assert torch.equal(example.multi_modal_inputs["image_grid_thw"], whole["image_grid_thw"])
    assert example.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 8, 8]]
    assert example.ids.count(vision.image_token_id) == 4 + 16
    assert trained_text(tokenizer, example) == ["The answer is 4.<|im_end|>"]


def test_every_way_to_name_an_image_gives_the_same(reader, tmp_path):
    (tmp_path / "sub dir").mkdir()
    file = tmp_path / "sub dir" / "cat: a.png"
    file.write_bytes(png())
    data = png_text()
    ways = [
        {**IMAGE, "path": "sub dir/cat: a.png"},
        {**IMAGE, "image": str(file)},
        {**IMAGE, "url": f"file://{quote(str(file))}"},
        {**IMAGE, "bytes": data},
        {**IMAGE, "base64": data},
        {**IMAGE, "image": f"data:image/png;base64,{data}"},
        {**IMAGE, "image": {"bytes": data, "path": "gone.png"}},
        {**IMAGE, "image": {"path": "sub dir/cat: a.png"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_url", "image_url": f"file://{quote(str(file))}"},
    ]
    rows = [row(way, text("?")) for way in ways]
    rows += [row(IMAGE, text("?"), images=["sub dir/cat: a.png"]), row(IMAGE, text("?"), image={"bytes": data})]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    examples = [load(reader, path, i) for i in range(len(rows))]
    assert examples[0].multi_modal_inputs["pixel_values"].shape == (16, 96)
    assert all(same(examples[0], other) for other in examples[1:])


def test_parquet_and_saved_datasets_hold_the_bytes(reader, tmp_path):
    def rows(images):
        """The second one has none. All content is lists, as a column of Parquet has one type."""
        made = [row(IMAGE, text(f"{i}?"), answer=[text("yes")], images=[images(i)]) for i in range(3)]
        return [made[0], row(text("1?"), answer=[text("yes")], images=[]), made[2]]

    path = write_jsonl(tmp_path / "a.jsonl", rows(lambda i: {"bytes": png_text(i)}))
    expected = [load(reader, path, i) for i in range(3)]
    stored = rows(lambda i: {"bytes": png(i), "path": None})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(stored), tmp_path / "a.parquet")
    saved = datasets.Dataset.from_list(stored).cast_column("images", datasets.List(datasets.Image()))
    saved.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        assert all(same(load(reader, path, i), expected[i]) for i in range(3))
    tokenizer, vision = reader
    fingerprints = [SFTDataset(config(tmp_path / "saved"), tokenizer, vision=vision).fingerprint() for _ in range(2)]
    assert fingerprints[0] == fingerprints[1]


def test_images_never_train(reader, tmp_path):
    _, vision = reader
    path = write_jsonl(tmp_path / "a.jsonl", [row({**IMAGE, "bytes": png_text()}, text("hello"))])
    example = load(reader, path, loss_on="all")
    of_image = [m for token, m in zip(example.ids, example.mask, strict=True) if token == vision.image_token_id]
    assert of_image == [0, 0, 0, 0] and sum(example.mask) == len(example.mask) - 4


def test_rows_with_and_without_images_make_one_batch(reader, tmp_path):
    tokenizer, vision = reader
    rows = [
        row({**IMAGE, "bytes": png_text(1)}, text("a")),
        row(text("b")),
        row({**IMAGE, "bytes": png_text(2)}, text("c")),
    ]
    data = SFTDataset(config(write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer, vision=vision)
    batch = BatchSource(data, global_batch_size=3, seed=0, shuffle=False, prefetch=False).next()
    assert [sorted(inputs) for inputs in batch.multi_modal_inputs] == [
        ["image_grid_thw", "pixel_values"],
        [],
        ["image_grid_thw", "pixel_values"],
    ]
    last = batch.select([2, 1])
    assert torch.equal(last.joined_multi_modal_inputs["pixel_values"], data.load(2).multi_modal_inputs["pixel_values"])
    assert batch.select([1]).joined_multi_modal_inputs == {}
    assert batch.joined_multi_modal_inputs["image_grid_thw"].shape == (2, 3)
    alone = BatchSource(
        SFTDataset(config(write_jsonl(tmp_path / "b.jsonl", rows[1:2])), tokenizer, vision=vision),
        global_batch_size=1, seed=0, prefetch=False,
    ).next()  # fmt: skip
    assert alone.multi_modal_inputs == ()


def test_truncation_never_cuts_an_image(reader, tmp_path):
    image = {**IMAGE, "bytes": png_text(0, 40, 40)}
    path = write_jsonl(tmp_path / "a.jsonl", [row(image, text("hello there"))])
    length = len(load(reader, path).ids)
    assert f"has {length} tokens and data.max_length is {length - 1}" in refused(reader, path, max_length=length - 1)
    assert "that data.truncation cuts" in refused(reader, path, max_length=20, truncation="left")
    assert isinstance(load(reader, path, max_length=20, truncation="drop"), RejectedRow)
    kept = load(reader, path, max_length=length - 2, truncation="right")
    assert kept.truncated and len(kept.ids) == length - 2
    answered = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}, *row(image)["messages"]]
    }
    path = write_jsonl(tmp_path / "b.jsonl", [answered])
    skipped = load(reader, path, max_length=20, truncation="right", on_bad_row="skip")
    assert isinstance(skipped, RejectedRow) and "that data.truncation cuts" in skipped.why


BROKEN = png()[:60]
MISTAKES = {
    "web": ({**IMAGE, "url": "https://example.com/a.png"}, "no image can be read"),
    "missing": ({**IMAGE, "path": "gone.png"}, "gone.png'); paths are relative to the data file"),
    "cut off": ({**IMAGE, "path": "broken.png"}, "no image can be read"),
    "no base64": ({**IMAGE, "bytes": "???"}, "is not base64"),
    "a number": ({**IMAGE, "image": 3}, "].image is 3; give the path of a file"),
    "two sources": ({**IMAGE, "path": "a", "url": "b"}, "has path and url"),
    "video": ({"type": "video", "video": "a.mp4"}, "type is 'video'"),
    "no type": ({"image": "a.png"}, "has no type"),
    "too narrow": ({**IMAGE, "bytes": png_text(0, 500, 1)}, "processor refuses the image"),
    "without image": (IMAGE, "0 images in its field images and 1 parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_wrong_image_is_one_line_with_row_and_file(reader, tmp_path, case):
    part, says = MISTAKES[case]
    (tmp_path / "broken.png").write_bytes(BROKEN)
    path = write_jsonl(tmp_path / "a.jsonl", [row(part, text("?"))])
    message = refused(reader, path)
    assert message.startswith(f"{path}:1: ") and says in message, message
    assert "messages[0].content" in message or case == "without image"


def test_images_beside_need_a_place(reader, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row(text("a"), images=[{"bytes": png_text()}])])
    assert "1 images in its field images and 0 parts" in refused(reader, path)


def test_the_token_of_images_in_a_text_is_refused(reader, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row(text("<|image_pad|>"))])
    assert "1 image tokens (<|image_pad|>) for 0 images" in refused(reader, path)
    path = write_jsonl(tmp_path / "b.jsonl", [row(text("<|image_pad|>"), {**IMAGE, "bytes": png_text()})])
    assert "2 image tokens (<|image_pad|>) for 1 images" in refused(reader, path)


def test_a_template_that_knows_no_images_is_refused(reader, tmp_path):
    template = tmp_path / "chatml.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\nx<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [row({**IMAGE, "bytes": png_text()}, text("?"))])
    assert "0 image tokens (<|image_pad|>) for 1 images" in refused(reader, path, chat_template=str(template))


def test_the_processors_template_is_used_where_the_tokenizers_knows_no_images(tmp_path):
    tokenizer, vision = make_vision(tmp_path / "model")
    tokenizer.chat_template = "{{ messages[0].content }}"
    path = write_jsonl(tmp_path / "a.jsonl", [row({**IMAGE, "bytes": png_text()}, text("?"))])
    assert load((tokenizer, vision), path).ids.count(vision.image_token_id) == 4


def test_a_model_of_text_alone_says_so(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row({**IMAGE, "bytes": png_text()}, text("?"))])
    message = refused((make_tokenizer(), None), path, on_bad_row="skip")
    assert message.startswith(f"{path}:1: messages[0].content[0].bytes is an image, and the model reads text alone")
    several = write_jsonl(tmp_path / "b.jsonl", [row(text("a"), text("b"))])
    assert "list of parts" in refused((make_tokenizer(), None), several)
    one = write_jsonl(tmp_path / "c.jsonl", [row(text("hello"))])
    plain = write_jsonl(
        tmp_path / "d.jsonl",
        [json.loads(json.dumps(row(text("hello"))).replace('[{"type": "text", "text": "hello"}]', '"hello"'))],
    )
    assert load((make_tokenizer(), None), one).ids == load((make_tokenizer(), None), plain).ids
