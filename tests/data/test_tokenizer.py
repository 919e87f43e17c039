"""Loading tokenizers, and what is said when that fails."""

import pytest

from mrl.data.dataset import SFTDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import DataError, ModelError
from tests.data.tiny_tokenizers import CHATML, config, make_tokenizer, turns, write_jsonl


@pytest.fixture
def folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_tokenizer_and_template(folder):
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_template == CHATML and tokenizer("fox")["input_ids"] == make_tokenizer()("fox")["input_ids"]


def test_the_template_file_replaces_the_tokenizers(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("MY {{ messages[0].content }}")
    tokenizer = load_tokenizer(str(folder), chat_template=str(tmp_path / "t.jinja"))
    assert tokenizer.apply_chat_template(turns("fox"), tokenize=False) == "MY fox"


@pytest.mark.parametrize(
    "make, path, message",
    [
        (None, "{tmp}/none", "{tmp}/none: is no folder here, .*give a Hugging Face model folder or hub id"),
        (None, "a/b/c", "a/b/c: is no folder here"),
        (lambda p: p.write_text("x"), "{tmp}/it", "{tmp}/it: is no folder here"),
        (lambda p: p.mkdir(), "{tmp}/it", "{tmp}/it: the folder holds no tokenizer .*copy the tokenizer's files"),
        (
            lambda p: (p.mkdir(), (p / "tokenizer.json").write_text("{")),
            "{tmp}/it",
            "{tmp}/it: the tokenizer cannot be loaded .*; get the tokenizer's files again",
        ),
    ],
)
def test_bad_folders(tmp_path, make, path, message):
    if make:
        make(tmp_path / "it")
    with pytest.raises(ModelError, match=message.replace("{tmp}", str(tmp_path))) as error:
        load_tokenizer(path.replace("{tmp}", str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_hub_id_that_does_not_load(monkeypatch):
    def offline(path, trust_remote_code):
        raise OSError(f"cannot reach the hub for {path}")

    monkeypatch.setattr("mrl.data.tokenizer.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(ModelError, match="org/model: is no folder here, and no hub id that .*cannot reach the hub"):
        load_tokenizer("org/model")


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "cannot be read .*give a file with a Jinja template"),
        (" \n", "is empty; give a file with a Jinja template"),
        (
            "{% for m in messages %}",
            r"the chat template: is not valid Jinja \(line 1: .*name another in data.chat_template",
        ),
    ],
)
def test_a_template_that_is_none(folder, tmp_path, text, says):
    """Whatever data.on_bad_row is: no row is at fault."""
    path = tmp_path / "t.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=says):
        load_tokenizer(str(folder), chat_template=str(path))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_tokenizers_own_template_that_is_none_is_said_where_a_row_needs_it(folder, tmp_path, on_bad_row):
    """A tokenizer whose template nothing reads, as a teacher's, works. No row is skipped for the template."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    tokenizer = load_tokenizer(str(folder))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fox"}, {"messages": turns("fox", "dog")}])
    rows = {
        name: SFTDataset(config(path, format=name, on_bad_row=on_bad_row), tokenizer) for name in ("text", "messages")
    }
    assert rows["text"].load(0).ids
    with pytest.raises(DataError, match=r"the chat template: is not valid Jinja \(line 1: ") as error:
        rows["messages"].load(1)
    assert not error.value.may_be_skipped
