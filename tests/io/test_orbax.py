import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writers import TINY, assert_same_params, random_params, tiny

from specjax.io.checkpoint import Checkpoint, load_checkpoint, load_config, save_checkpoint
from specjax.models.config import RopeConfig

EVERY_FIELD = tiny(
    activation="gelu_tanh",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    tied_embeddings=True,
    norm_epsilon=1e-6,
    sliding_windows=(None, 16),
    rope=RopeConfig(
        theta=5e5,
        scaling="yarn",
        factor=4.0,
        original_max_positions=64,
        attention_factor=1.25,
        truncate=False,
        frequency_factors=(1.0, 2.0, 3.0, 4.0),
    ),
)


def checkpoint(config=TINY, params=None, **changes):
    params = random_params(config) if params is None else params
    params = jax.tree.map(jnp.asarray, params)
    whole = Checkpoint(config=config, params=params, eos_ids=(2, 5), bos_id=1, source=Path("elsewhere"))
    return dataclasses.replace(whole, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory that tests may copy, not change."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    save_checkpoint(directory, checkpoint())
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    """The same directory, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def odd_values(leaf, dtype):
    """The leaf in another dtype, with negative zero, infinities, NaN and the smallest numbers in front."""
    leaf = np.array(leaf.astype(dtype))
    odd = np.array([-0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38], np.float32).astype(dtype)
    leaf.reshape(-1)[: len(odd)] = odd
    return leaf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_exact(tmp_path, dtype):
    params = jax.tree.map(lambda leaf: odd_values(leaf, jnp.dtype(dtype)), random_params(TINY))
    save_checkpoint(tmp_path / "model", checkpoint(params=params))
    loaded = load_checkpoint(tmp_path / "model", dtype=dtype)
    assert_same_params(loaded.params, params)
    assert (loaded.config, loaded.eos_ids, loaded.bos_id) == (TINY, (2, 5), 1)
    assert loaded.source == tmp_path / "model"


def test_every_field_of_the_config_survives(tmp_path):
    save_checkpoint(tmp_path, checkpoint(EVERY_FIELD, eos_ids=(), bos_id=None))
    loaded = load_checkpoint(tmp_path, dtype="float32")
    assert loaded.config == EVERY_FIELD
    assert load_config(tmp_path) == EVERY_FIELD
    assert (loaded.eos_ids, loaded.bos_id) == ((), None)
    assert_same_params(loaded.params, random_params(EVERY_FIELD))


@pytest.mark.parametrize(("stored", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_converts_to_the_dtype_asked_for(tmp_path, stored, asked):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(stored)), random_params(TINY))
    save_checkpoint(tmp_path, checkpoint(params=params))
    loaded = load_checkpoint(tmp_path, dtype=asked).params
    assert_same_params(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(asked)), params))


def test_nothing_is_overwritten(saved, tmp_path):
    before = (saved / "specjax.json").read_bytes()
    for target in (saved, saved / "specjax.json"):
        with pytest.raises(ValueError, match="new or empty directory"):
            save_checkpoint(target, checkpoint())
    assert (saved / "specjax.json").read_bytes() == before


def test_params_that_do_not_fit_the_config_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"1 missing \(unembed\)"):
        save_checkpoint(tmp_path, checkpoint(params=random_params(tiny(tied_embeddings=True))))
    assert list(tmp_path.iterdir()) == []


# ---- Damage ----


def change(directory, **fields):
    """Changes fields of the stored config; None removes."""
    path = directory / "specjax.json"
    settings = json.loads(path.read_text())
    for name, value in fields.items():
        part = settings if name in settings else settings["config"]
        part[name] = value
        if value is None:
            del part[name]
    path.write_text(json.dumps(settings))


def test_one_error_names_all_that_is_wrong(copied):
    change(copied, num_layers=3, tied_embeddings=True, vocab_size=97)
    with pytest.raises(ValueError, match="expected the tensors") as caught:
        load_checkpoint(copied, dtype="float32")
    message = str(caught.value)
    assert "9 missing (layers.2.attention_norm, " in message
    assert "1 unexpected (unembed)" in message
    assert "1 misshapen (embed [96, 32] instead of [97, 32])" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"num_layers": 2**60},
        {"num_layers": -1},
        {"num_layers": None},
        {"vocab_size": "96"},
        {"num_heads": 4.0},
        {"num_heads": True},
        {"norm_epsilon": float("nan")},
        {"activation": "sine"},
        {"sliding_windows": [0, 1]},
        {"sliding_windows": "ab"},
        {"tied_embeddings": 0},
        {"rope": {"theta": 1.0, "unheard": 1}},
        {"rope": 5},
        {"config": 5},
        {"files": None},
        {"files": [1]},
        {"eos_ids": [96]},
        {"eos_ids": [-1]},
        {"bos_id": "1"},
    ],
)
def test_damaged_settings_are_refused(copied, fields):
    change(copied, **fields)
    with pytest.raises(ValueError, match=str(copied)):
        load_checkpoint(copied, dtype="float32")


def data_files(directory):
    return sorted(file for file in (directory / "params").rglob("*") if file.parent.name == "d")


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_file_is_named(copied, length):
    for file in data_files(copied):
        content = file.read_bytes()
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"1 others: .*d/{file.name} of {len(content[:length])} bytes"):
            load_checkpoint(copied, dtype="float32")
        file.write_bytes(content)


def test_a_missing_file_is_named(copied):
    file = data_files(copied)[0]
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} of None bytes"):
        load_checkpoint(copied, dtype="float32")


@pytest.mark.parametrize("byte", [b" ", b"\xff", b"["])
def test_damaged_metadata_is_refused(copied, byte):
    file = copied / "params" / "_METADATA"
    file.write_bytes(byte * file.stat().st_size)
    with pytest.raises(ValueError, match="params to be"):
        load_checkpoint(copied, dtype="float32")


LOAD_ALL = """
import sys
from specjax.io.checkpoint import load_checkpoint
for path in sys.argv[1:]:
    try:
        load_checkpoint(path, dtype="float32")
    except ValueError as error:
        print(error)
"""


def test_damaged_storage_of_the_right_size_is_refused(copied, tmp_path):
    """In a process of its own: the storage library complains from its threads, too."""
    other = tmp_path / "other"
    shutil.copytree(copied, other)
    for file in [copied / "params" / "manifest.ocdbt", *data_files(other)]:
        file.write_bytes(b"\xff" * file.stat().st_size)
    command = [sys.executable, "-c", LOAD_ALL, str(copied), str(other)]
    messages = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for directory in (copied, other):
        assert f"expected {directory / 'params'} to be" in messages


def test_claims_beyond_the_size_of_the_files_are_refused(copied):
    """A file list made to fit: every byte of the weights is gone, what describes them is whole."""
    largest = max(data_files(copied), key=lambda file: file.stat().st_size)
    largest.write_bytes(b"")
    change(copied, files={})
    with pytest.raises(ValueError, match=r"to hold \d+ bytes of weights, got \d+ in all"):
        load_checkpoint(copied, dtype="float32")


def test_metadata_of_absurd_size_is_refused(copied, monkeypatch):
    monkeypatch.setattr("specjax.io.orbax.MAX_JSON_BYTES", 10)
    with pytest.raises(ValueError, match="metadata of at most 10 bytes"):
        load_checkpoint(copied, dtype="float32")


def test_a_directory_without_settings_is_no_checkpoint(copied):
    (copied / "specjax.json").unlink()
    with pytest.raises(ValueError, match=r"expected safetensors, one \.gguf file or a specjax Orbax checkpoint"):
        load_checkpoint(copied, dtype="float32")
