import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writers import (
    TINY,
    assert_same_params,
    gguf_metadata,
    gguf_tensors,
    huggingface_config,
    huggingface_tensors,
    random_params,
    tiny,
    write_gguf,
    write_huggingface,
)
from vocabularies import byte_level_metadata, byte_tokenizer

from scripts.convert_checkpoint import main
from specjax.io.checkpoint import convert_checkpoint, load_checkpoint, load_config
from specjax.io.tokenizer import load_tokenizer, save_tokenizer

OTHER = random_params(TINY, seed=1)
BYTES = tiny(vocab_size=260)
"""The tiny model for a byte-level tokenizer."""


def write_hf(directory, config=TINY):
    return write_huggingface(directory, huggingface_config(config), huggingface_tensors(random_params(config)))


def write_packed(path, params=None):
    params = random_params(TINY) if params is None else params
    return write_gguf(path, gguf_metadata(TINY), gguf_tensors(params, paired=True))


# ---- What lies there ----


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path):
    path = write_packed(tmp_path / "any name.gguf")
    checkpoint = load_checkpoint(str(tmp_path), dtype="float32")
    assert checkpoint.source == path
    assert_same_params(checkpoint.params, random_params(TINY))


def test_two_gguf_files_are_ambiguous(tmp_path):
    write_packed(tmp_path / "a.gguf")
    write_packed(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"one \.gguf file .* got 2 files \(a\.gguf, b\.gguf\)"):
        load_checkpoint(tmp_path, dtype="float32")
    assert load_checkpoint(tmp_path / "b.gguf", dtype="float32").source == tmp_path / "b.gguf"


def test_safetensors_come_before_gguf(tmp_path):
    write_packed(tmp_path / "a.gguf", OTHER)
    write_hf(tmp_path)
    assert_same_params(load_checkpoint(tmp_path, dtype="float32").params, random_params(TINY))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.pkl"])
def test_pickles_are_refused_unread(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="can run code and are never read; convert to safetensors first"):
            load_checkpoint(path, dtype="float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "no such file or directory"),
        ("model.safetensors", r"pass the directory that holds it and its config\.json"),
        ("notes.txt", "not one of these"),
    ],
)
def test_other_paths_are_refused_with_advice(tmp_path, name, message):
    if name != "absent":
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / name, dtype="float32")


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got 0 files"):
        load_config(tmp_path)


# ---- Conversion ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hugging_face_directory_keeps_its_tokenizer_files(tmp_path, dtype):
    source = write_hf(tmp_path / "hf", BYTES)
    save_tokenizer(byte_tokenizer("ab"), source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "special_tokens_map.json").write_text("{}")
    (source / "training_args.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "out", dtype=dtype)
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.is_file()}
    kept = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    assert set(files) == kept | {"generation_config.json", "specjax.json"}
    assert all(files[name] == (source / name).read_bytes() for name in kept)
    loaded = load_checkpoint(tmp_path / "out", dtype=dtype).params
    assert_same_params(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), random_params(BYTES)))


def test_a_gguf_file_keeps_its_tokenizer(tmp_path):
    vocabulary = byte_level_metadata("ab")
    del vocabulary["general.architecture"]
    metadata = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vocabulary.items()}
    tensors = gguf_tensors(random_params(BYTES), paired=True)
    source = write_gguf(tmp_path / "model.gguf", gguf_metadata(BYTES) | metadata, tensors)
    checkpoint = convert_checkpoint(source, tmp_path / "out", dtype="float32")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.encode("abba") == load_tokenizer(source).encode("abba")
    assert checkpoint.eos_ids == tokenizer.eos_ids == (257,)
    again = load_checkpoint(tmp_path / "out", dtype="float32")
    assert (again.config, again.eos_ids) == (checkpoint.config, (257,))
    assert_same_params(again.params, random_params(BYTES))


def test_a_converted_directory_converts_again(tmp_path):
    source = write_hf(tmp_path / "hf", BYTES)
    save_tokenizer(byte_tokenizer("ab"), source)
    convert_checkpoint(source, tmp_path / "first", dtype="float32")
    convert_checkpoint(tmp_path / "first", tmp_path / "second", dtype="float32")
    assert load_tokenizer(tmp_path / "second").encode("ab") == [256]
    assert_same_params(load_checkpoint(tmp_path / "second", dtype="float32").params, random_params(BYTES))


def test_conversion_never_overwrites_and_says_so_before_it_reads(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="new or empty directory"):
        convert_checkpoint(tmp_path / "absent", tmp_path, dtype="float32")


# ---- The script ----


def test_the_script_converts_and_says_what_it_did(tmp_path, capsys):
    source = write_hf(tmp_path / "hf")
    assert main(["--model", str(source), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    count = sum(leaf.size for leaf in jax.tree.leaves(random_params(TINY)))
    assert f"read {source}: 21 tensors, {count:,} parameters" in said
    assert f"wrote {tmp_path / 'out'}: {2 * count:,} bytes of bfloat16 weights and specjax.json" in said
    assert load_config(tmp_path / "out").num_layers == 2


@pytest.mark.parametrize("model", ["no-such-model", "damaged"])
def test_the_script_reports_a_users_error_in_one_line(tmp_path, capsys, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    assert main(["--model", model, "--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: expected ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
