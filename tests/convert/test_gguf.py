"""GGUF files: what is imported is the model that was written, transformers reads the same of them, and faults are named.

Not covered here: files of llama.cpp's own converter and quantiser, neither of which is a Python package; the writer of these
tests follows convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.dequant import dequantize as dequantised_by_transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mrl import cli
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.converters.gguf_file import read_gguf
from mrl.errors import ModelError
from tests.convert import gguf_files, hf_folders
from tests.convert.cases import load_folder
from tests.convert.test_refused import run
from tests.convert.test_verify import verify
from tests.engine.harness import run_case

FAMILIES = {
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 32},
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture
def made(hf, tmp_path):
    """`made(family, kind, tied=False, ...)`: (Hugging Face folder, GGUF file of it, what its tensors stand for)."""

    def make(family="llama", kind="F32", *, tied=False, write=None, **fields):
        source = hf(family, tied=tied, **({"intermediate_size": 64} | FAMILIES[family] | fields))
        file = tmp_path / "in" / f"{family}.gguf"
        file.parent.mkdir(exist_ok=True)
        return source, file, gguf_files.write(source, file, kind, **(write or {}))

    return make


@pytest.mark.parametrize(("family", "tied"), [*((f, False) for f in FAMILIES), ("llama", True), ("qwen2_moe", True)])
def test_an_exact_file_is_the_model_that_it_was_made_from(made, tmp_path, family, tied):
    """Bit for bit, and megatron-core computes from it what transformers does from the folder."""
    source, file, _ = made(family, tied=tied)
    done = CliRunner().invoke(cli.main, ["convert", "import", str(file), str(tmp_path / "mcore"), "--verify"])
    assert done.exit_code == 0, done.output
    assert "F32 as they are" in done.stdout and "no tokenizer was written: the file has none" in done.stdout
    code, found = verify(source, tmp_path / "mcore")
    assert code == 0 and found["same"] and found["differences"] == [], found
    assert all(row["max_difference"] < 2e-5 for row in found["logits"])
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert hf_folders.differences(source, tmp_path / "back") == []
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert (
        not info["missing_keys"]
        and not info["unexpected_keys"]
        and type(loaded).__name__ in json.loads((source / "config.json").read_text())["architectures"]
    )


def test_types_that_differ_inside_one_tensor_are_the_same_model(made, tmp_path):
    """q as Q8_0, which is read as bf16, and k and v as F16: the checkpoint has one tensor of them, in fp32, with the same values."""
    source, file, stands_for = made("llama", "F16", write={"kinds": {"q_proj": "Q8_0"}})
    done = CliRunner().invoke(cli.main, ["convert", "import", str(file), str(tmp_path / "mcore"), "--verify"])
    assert done.exit_code == 0 and (tmp_path / "mcore").is_dir(), done.output
    assert (
        "of these 6 in the dtype of the tensor that holds them: model.layers.0.self_attn.q_proj.weight" in done.stdout
    )


CASES = [("llama", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_1")]
CASES += [("mixtral", "Q4_0"), ("qwen2_moe", "F16"), ("qwen3_moe", "Q8_0")]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_other_types(made, tmp_path, family, kind):
    """F16 and BF16 as they are, quantised ones in bf16, norms in F32; in an export that transformers loads."""
    _, file, stands_for = made(family, kind)
    done = CliRunner().invoke(cli.main, ["convert", "import", str(file), str(tmp_path / "mcore"), "--verify"])
    assert done.exit_code == 0, done.output
    assert (f" {kind}, " if kind in DTYPES else f"{kind} read as bf16") in done.stdout
    export_hf(tmp_path / "mcore", tmp_path / "back")
    back = load_folder(str(tmp_path / "back"))
    assert back.keys() == stands_for.keys()
    matrix = DTYPES.get(kind, torch.bfloat16)
    assert {t.dtype for t in back.values()} == {matrix, torch.float32}
    assert back["model.norm.weight"].dtype == torch.float32
    assert back["model.layers.1.self_attn.q_proj.weight"].dtype == matrix
    assert [n for n in back if not torch.equal(back[n], stands_for[n].to(back[n].dtype))] == []
    told = json.loads((tmp_path / "back/config.json").read_text())
    assert told["dtype"] == str(matrix).removeprefix("torch.")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_transformers_reads_the_same(made, tmp_path, family, kind):
    """The independent reader: tensors, and logits under its own config, for what it reads.

    Its parts, as `from_pretrained(gguf_file=...)`, which puts them together, asks for accelerate.
    """
    source, file, _ = made(family, kind)
    import_hf(file, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    told = json.loads((source / "config.json").read_text())
    for unread in {"qwen3": ["head_dim"], "qwen3_moe": ["moe_intermediate_size"]}.get(family, []):
        setattr(config, unread, told[unread])  # it takes its own default
    theirs = AutoModelForCausalLM.from_config(config, dtype=dtype)
    theirs.load_state_dict(load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=theirs)["tensors"])
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=dtype)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert [n for n, t in ours.state_dict().items() if not torch.equal(t, theirs.state_dict()[n])] == []
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        # it keeps the epsilon of the norms as the file has it, in single precision
        assert torch.allclose(ours(tokens).logits, theirs(tokens).logits, rtol=0, atol=2e-6 if kind == "F32" else 2e-2)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_types_that_only_llama_cpp_writes(made, tmp_path, kind):
    """Random blocks of such a type, as transformers' own code reads them."""
    _, file, _ = made("llama", write={"lose": "blk.1.ffn_down.weight"}, hidden_size=32, intermediate_size=512)
    of = gguf.GGMLQuantizationType[kind]
    blocks = _random_blocks(of, rows=32, columns=512)
    _add_tensor(file, "blk.1.ffn_down.weight", blocks, of)
    import_hf(file, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    found = load_folder(str(tmp_path / "back"))["model.layers.1.mlp.down_proj.weight"]
    numbers = dequantised_by_transformers(torch.from_numpy(blocks), int(of)).view(32, 512)
    assert found.abs().max() > 0 and torch.equal(found, numbers.bfloat16())


def _random_blocks(of, *, rows, columns):
    """Bytes of `of`, whose scales, in half precision, are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[of]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    where = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}.get(
        of.name, [0, 2] if of.name in ("Q4_K", "Q5_K") else [0]
    )
    for at in where:
        scale = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def _add_tensor(file, name, blocks, of):
    """Writes the file anew, with one more tensor."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, blocks, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(file.with_suffix(".new"), file)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope", [LLAMA3, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}], ids=["llama3", "linear"]
)
def test_scalings_of_the_rotary_embedding(made, tmp_path, rope):
    source, file, _ = made("llama", rope_parameters=rope, head_dim=16)
    import_hf(file, tmp_path / "mcore")
    told = json.loads((tmp_path / "mcore/config.json").read_text())
    assert {k: v for k, v in told["rope_parameters"].items() if k in rope} == rope and told["head_dim"] == 16
    assert told["rms_norm_eps"] == json.loads((source / "config.json").read_text())["rms_norm_eps"]
    code, found = verify(source, tmp_path / "mcore")
    assert code == 0 and found["same"], found


def test_engines_start_from_it(made, tmp_path):
    source, file, _ = made("llama")
    import_hf(file, tmp_path / "mcore")
    tokens = list(range(40))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    far = run_case(
        1, "tests.convert.cases:starts_from_import", hf=str(source), imported=str(tmp_path / "mcore"),
        layouts=[{}, {"backend": "fsdp"}], tokens=tokens, logits=logits,
    )  # fmt: skip
    assert far["{}"] < 5e-6


def test_an_import_that_was_interrupted_goes_on(made, tmp_path):
    source, file, _ = made("qwen3_moe")

    def interrupted(total):
        told = []

        def show(count):
            told.append(count)
            if sum(told) > total * 0.6:
                raise KeyboardInterrupt

        return show

    with pytest.raises(KeyboardInterrupt):
        import_hf(file, tmp_path / "mcore", file_bytes=8_000, progress=interrupted)
    finished = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".mcore.converting/mcore").glob("*.distcp")}
    import_hf(file, tmp_path / "mcore", file_bytes=8_000)
    now = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "mcore/mcore").glob("*.distcp")}
    assert sum(finished[name] == now[name] for name in finished) >= 3
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert hf_folders.differences(source, tmp_path / "back") == []


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "The quick brown fox, 1234 times!\n\n  It's over; isn't it?",
    "<|im_start|>user\nHi<|im_end|>",
    "naïve 漢字 🙂\t\tx",
]


def bpe() -> tuple[PreTrainedTokenizerFast, dict]:
    """A byte-level tokenizer that cuts text as Qwen2's does, and what a GGUF file says of it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    core.train_from_iterator(TEXTS * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    merges = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    return tokenizer, {
        "tokenizer_model": "gpt2", "tokenizer_pre": "qwen2", "token_list": tokens, "token_merges": merges,
        "token_types": [3] * 3 + [1] * (len(tokens) - 3), "eos_token_id": 2, "pad_token_id": 0,
        "chat_template": tokenizer.chat_template,
    }  # fmt: skip


def test_the_tokenizer_is_the_files_own(made, tmp_path):
    tokenizer, keys = bpe()
    _, file, _ = made("qwen2", vocab=len(tokenizer), write={"tokenizer": keys})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (file.parent / name).write_text("{}")  # of another model, beside the file
    done = import_hf(file, tmp_path / "mcore")
    assert done.notes[-1] == "tokenizer: made of the file by transformers"
    export_hf(tmp_path / "mcore", tmp_path / "back")
    found = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert found.decode(found(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert (found.eos_token_id, found.pad_token_id) == (2, 0)
    told = json.loads((tmp_path / "back/config.json").read_text())
    assert (told["eos_token_id"], told["pad_token_id"]) == (2, 0)


def test_a_tokenizer_that_cannot_be_made_is_taken_from_a_folder_or_left_out(made, tmp_path):
    tokenizer, keys = bpe()
    _, file, _ = made("qwen2", vocab=len(tokenizer), write={"tokenizer": keys | {"tokenizer_pre": "of-tomorrow"}})
    note = import_hf(file, tmp_path / "without").notes[-1]
    assert "no tokenizer was written" in note and "'of-tomorrow'" in note and "--tokenizer HF_DIR" in note
    assert not list((tmp_path / "without").glob("tokenizer*"))
    tokenizer.save_pretrained(tmp_path / "own")
    done = CliRunner().invoke(
        cli.main, ["convert", "import", str(file), str(tmp_path / "with"), "--tokenizer", str(tmp_path / "own")]
    )
    assert done.exit_code == 0 and f"tokenizer: of {tmp_path / 'own'}" in done.stdout, done.output
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(tmp_path / "larger")
    code, said = run("import", file, tmp_path / "out", "--tokenizer", tmp_path / "larger")
    assert code == 2 and f"has tokens up to {len(tokenizer) - 1} and the model has {len(tokenizer) - 1}; give" in said
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_sentencepiece(made, tmp_path):
    core = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    core.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=340, special_tokens=specials, show_progress=False)
    )
    made_of = json.loads(core.to_str())["model"]
    merges = [tuple(pair) for pair in made_of["merges"]]
    tokens = sorted(made_of["vocab"], key=made_of["vocab"].get)
    ranks = {a + b: i for i, (a, b) in enumerate(merges)}
    keys = {
        "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": tokens,
        "token_scores": [0.0 if i < 259 else -float(ranks.get(t, 1000 + i)) for i, t in enumerate(tokens)],
        "token_types": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259), "bos_token_id": 1, "eos_token_id": 2,
        "unk_token_id": 0, "add_bos_token": True,
    }  # fmt: skip
    _, file, _ = made("llama", vocab=len(tokens), write={"tokenizer": keys})
    assert import_hf(file, tmp_path / "mcore").notes[-1] == "tokenizer: made of the file by transformers"
    found = AutoTokenizer.from_pretrained(tmp_path / "mcore")
    own = LlamaTokenizer(vocab=made_of["vocab"], merges=merges)
    for text in TEXTS:
        assert found(text)["input_ids"] == [1, *own(text, add_special_tokens=False)["input_ids"]]


def truncated(file):
    os.truncate(file, file.stat().st_size - 40)


def header_cut(file):
    os.truncate(file, 300)


def type_of_first(number):
    """The type of `output_norm.weight`, of one dimension, becomes `number`."""

    def edit(file):
        data = bytearray(file.read_bytes())
        at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
        assert struct.unpack("<I", data[at : at + 4]) == (0,)
        data[at : at + 4] = struct.pack("<I", number)
        file.write_bytes(data)

    return edit


REFUSED = {
    "architecture": ({}, lambda f: f.write_bytes(f.read_bytes().replace(b"llama", b"gemma")), "general.architecture 'gemma' is not supported; supported are llama, "),
    "truncated": ({}, truncated, "its header promises"),
    "cut in its header": ({}, header_cut, "its header goes on past its end, at byte 300"),
    "not one": ({}, lambda f: f.write_bytes(b"PK" + f.read_bytes()), "is no GGUF file"),
    "type of tomorrow": ({}, type_of_first(99), "output_norm.weight is of type 99, which gguf 0.19.0 does not know"),
    "type without code": ({}, type_of_first(24), "output_norm.weight is of type I8, which gguf 0.19.0 cannot turn into numbers"),
    "missing tensor": ({"lose": "blk.1.ffn_up.weight"}, None, "1 missing (model.layers.1.mlp.up_proj.weight)"),
    "missing embedding": ({"lose": "token_embd.weight"}, None, "has no tensor token_embd.weight"),
    "unknown key": ({"attention.clamp_kqv": 8.0}, None, "llama.attention.clamp_kqv = 8.0 is not supported: it may change the maths"),
    "missing key": ({"block_count": None}, None, "llama.block_count is None and not one number above 0"),
    "yarn": ({"rope.scaling.type": "yarn"}, None, "llama.rope.scaling.type = 'yarn' is not supported"),
    "part of a head turns": ({"rope.dimension_count": 4}, None, "llama.rope.dimension_count = 4 is not supported"),
    "heads that do not divide": ({"attention.head_count": 5, "attention.key_length": None}, None, "is not supported: heads have 6"),
    "theta of 0": ({"rope.freq_base": 0.0}, None, "rope_parameters.rope_theta = 0.0 is not a number above 1"),
    "theta in words": ({"rope.freq_base": "many"}, None, "llama.rope.freq_base = 'many' is not supported: it is no number"),
    "epsilon of 2": ({"attention.layer_norm_rms_epsilon": 2.0}, None, "rms_norm_eps = 2.0 is not a number above 0 and of at most 1"),
    "layers without end": ({"block_count": 2**31}, None, "llama.block_count = 2147483648 is not supported"),
    "a layer too few": ({"block_count": 1}, None, "9 left over (blk.1."),
    "a part": ({"tokenizer": {"split": None}}, None, "is one of 3 parts"),
    "other sizes": ({"feed_forward_length": 96}, None, "of another shape than config.json says"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imported_is_refused_in_a_line(made, tmp_path, monkeypatch, name):
    write, edit, words = REFUSED[name]
    if name == "a part":
        monkeypatch.setattr(
            gguf.GGUFWriter, "add_split", lambda self, _: self.add_uint16("split.count", 3), raising=False
        )
    _, file, _ = made("llama", write=write)
    if edit is not None:
        edit(file)
    code, said = run("import", file, tmp_path / "out")
    assert code == 2 and words in said and said.count("\n") == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_every_cut_is_found(made):
    """By the header alone: nothing is converted of a file that ends too soon."""
    _, file, _ = made("qwen2", "Q8_0", write={"tokenizer": bpe()[1]}, vocab=300)
    data, rng = file.read_bytes(), random.Random(0)
    for at in [*range(4, 60, 7), *(rng.randrange(60, len(data)) for _ in range(40)), len(data) - 1]:
        file.write_bytes(data[:at])
        with pytest.raises(ModelError, match="get the file again"):
            read_gguf(file)


def test_experts_that_config_does_not_count_are_not_lost(made, tmp_path):
    _, file, _ = made("qwen3_moe", write={"expert_count": 3})
    code, said = run("import", file, tmp_path / "out")
    assert code == 2 and "of another shape than config.json says" in said


def test_the_package_is_named_where_it_is_not_installed(made, tmp_path, monkeypatch):
    _, file, _ = made("llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, said = run("import", file, tmp_path / "out")
    assert code == 2 and "pip install gguf" in said and said.count("\n") == 1, said


def test_wrong_uses(hf, made, tmp_path):
    _, file, _ = made("llama")
    assert "has no effect" in run("import", hf("llama"), tmp_path / "out", "--tokenizer", hf("llama"))[1]
    assert f"is a folder of GGUF files ({file.name}); give the one" in run("import", file.parent, tmp_path / "out")[1]
    assert "is no folder with a tokenizer" in run("import", file, tmp_path / "out", "--tokenizer", tmp_path)[1]
    assert not (tmp_path / "out").exists()
