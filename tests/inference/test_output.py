"""The file of --out, where the folder goes between the check and the writing."""

import pytest

from mrl.errors import ConfigError
from mrl.inference.output import check_writable, writing


class OnMain:
    is_main = True


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_cannot_be_opened_is_one_line(tmp_path, gone):
    folder = tmp_path / "results"
    folder.mkdir()
    path = str(folder / "out.jsonl")
    check_writable(path)
    if not gone:
        with writing(path, OnMain()) as write:
            write({"text": "\u00e4"})
        assert (folder / "out.jsonl").read_text(encoding="utf-8") == '{"text": "\u00e4"}\n'
        return
    folder.rmdir()
    with (
        pytest.raises(ConfigError, match=r"^--out: .*cannot be written \(No such file or directory\)"),
        writing(path, OnMain()),
    ):
        pass
