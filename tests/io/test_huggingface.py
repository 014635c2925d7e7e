import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writers import (
    TINY,
    assert_same_params,
    huggingface_config,
    huggingface_tensors,
    random_params,
    tiny,
    write_huggingface,
)
from safetensors.numpy import save_file

from specjax.io.checkpoint import load_checkpoint, load_config

BIASED = {
    "llama": tiny(attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "qwen2": tiny(attention_bias=True),
}


def write(directory: Path, config=TINY, *, params=None, shards=1, drop=(), extra=(), **changes) -> Path:
    """Writes the tiny model, without the tensors of `drop` and with those of `extra`."""
    tensors = huggingface_tensors(random_params(config) if params is None else params)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | dict(extra)
    return write_huggingface(directory, huggingface_config(config, **changes), tensors, shards=shards)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_loads_every_param_under_its_name(tmp_path, shards, tied):
    config = tiny(tied_embeddings=tied)
    directory = write(tmp_path, config, shards=shards)
    checkpoint = load_checkpoint(directory, dtype="float32")
    assert_same_params(checkpoint.params, random_params(config))
    assert checkpoint.config.tied_embeddings == tied
    assert checkpoint.config.num_kv_heads == 2
    assert checkpoint.source == directory
    assert load_config(directory) == checkpoint.config


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_loads_biases(tmp_path, model_type):
    config = BIASED[model_type]
    write(tmp_path, config, model_type=model_type)
    assert_same_params(load_checkpoint(tmp_path, dtype="float32").params, random_params(config))


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converts_each_tensor_to_the_dtype_asked_for(tmp_path, stored, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(stored), random_params(TINY))
    write(tmp_path, params=params)
    loaded = load_checkpoint(tmp_path, dtype=dtype).params
    assert_same_params(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))


def test_refuses_other_dtypes(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        load_checkpoint(tmp_path, dtype="float16")


# ---- Tied embeddings ----


def test_tied_model_with_an_equal_head_is_tied(tmp_path):
    params = random_params(tiny(tied_embeddings=True))
    write(tmp_path, params=params, extra={"lm_head.weight": params["embed"]}, tie_word_embeddings=True)
    checkpoint = load_checkpoint(tmp_path, dtype="float32")
    assert checkpoint.config.tied_embeddings
    assert_same_params(checkpoint.params, params)


def test_tied_model_with_another_head_keeps_both_as_transformers_does(tmp_path):
    params = random_params(TINY)
    write(tmp_path, params=params, tie_word_embeddings=True)
    checkpoint = load_checkpoint(tmp_path, dtype="float32")
    assert not checkpoint.config.tied_embeddings
    assert_same_params(checkpoint.params, params)


def test_tied_model_with_a_head_alone_uses_it_at_both_ends(tmp_path):
    params = random_params(TINY)
    write(tmp_path, params=params, drop=["model.embed_tokens.weight"], tie_word_embeddings=True)
    loaded = load_checkpoint(tmp_path, dtype="float32").params
    assert "unembed" not in loaded
    np.testing.assert_array_equal(loaded["embed"], params["unembed"])


def test_untied_model_without_a_head_is_an_error(tmp_path):
    write(tmp_path, drop=["lm_head.weight"])
    with pytest.raises(ValueError, match=r"1 missing \(lm_head\.weight\)"):
        load_checkpoint(tmp_path, dtype="float32")


# ---- Names and shapes ----


def test_one_error_names_all_that_is_wrong(tmp_path):
    norm, wide = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"
    extra = {wide: np.zeros((32, 32), np.float32), "model.layers.7.new.weight": np.zeros(3, np.float32)}
    write(tmp_path, drop=[norm], extra=extra)
    with pytest.raises(ValueError, match="expected the tensors") as caught:
        load_checkpoint(tmp_path, dtype="float32")
    message = str(caught.value)
    assert f"1 missing ({norm})" in message
    assert "1 unexpected (model.layers.7.new.weight)" in message
    assert f"1 misshapen ({wide} [32, 32] instead of [16, 32])" in message
    assert str(tmp_path) in message


def test_long_lists_show_ten_names_and_the_count(tmp_path):
    write(tmp_path, extra={f"x{index:02}": np.zeros(1, np.float32) for index in range(25)})
    with pytest.raises(ValueError, match=r"25 unexpected \(x00, .*x09, \.\.\.\)"):
        load_checkpoint(tmp_path, dtype="float32")


def test_known_buffers_are_skipped_whatever_their_type(tmp_path):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "model.causal_mask": np.zeros((2, 2), np.bool_),
    }
    write(tmp_path, extra=buffers)
    assert_same_params(load_checkpoint(tmp_path, dtype="float32").params, random_params(TINY))


def test_quantised_tensors_are_refused_by_type(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    write(tmp_path, extra={name: np.zeros((64, 32), np.int8)})
    with pytest.raises(ValueError, match=r"up_proj\.weight \(I8\)"):
        load_checkpoint(tmp_path, dtype="float32")


# ---- Special ids ----


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"temperature": 1.0}, (2,)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(tmp_path, config, generation, expected):
    write(tmp_path, eos_token_id=config, bos_token_id=1)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load_checkpoint(tmp_path, dtype="float32")
    assert checkpoint.eos_ids == expected
    assert checkpoint.bos_id == 1


@pytest.mark.parametrize("value", [96, -1, "2", True, [2, None]])
def test_eos_ids_outside_the_vocabulary_are_refused(tmp_path, value):
    write(tmp_path, eos_token_id=value)
    with pytest.raises(ValueError, match="special token ids between 0 and 95"):
        load_checkpoint(tmp_path, dtype="float32")


# ---- Case 55 ----


def test_case_55_both_places_for_rope_theta_mean_the_same(tmp_path):
    write(tmp_path / "top", rope_theta=5e5)
    write(tmp_path / "nested", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    configs = [load_config(tmp_path / name) for name in ("top", "nested")]
    assert configs[0] == configs[1]
    assert configs[0].rope.theta == 5e5


# ---- Damage ----


@pytest.mark.parametrize("offset", [0, 4, 8, 9, 100, 3000, 20_000, -40_000, -5, -1])
def test_truncated_safetensors_are_refused(tmp_path, offset):
    file = write(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:offset])
    with pytest.raises(ValueError, match=r"model\.safetensors to be a safetensors file"):
        load_checkpoint(tmp_path, dtype="float32")


def _tensor(begin: int, end: int, shape: list[int]) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "overlapping": {"a": _tensor(0, 8, [2]), "b": _tensor(4, 12, [2])},
    "past the end": {"a": _tensor(0, 8000, [2000])},
    "backwards": {"a": _tensor(8, 0, [2])},
    "product overflows": {"a": _tensor(0, 8, [2**40, 2**40])},
    "negative": {"a": _tensor(0, 8, [-2])},
    "shape and offsets disagree": {"a": _tensor(0, 8, [3])},
    "not a tensor": {"a": 1},
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_safetensors_headers_are_refused(tmp_path, name):
    header = json.dumps(HEADERS[name]).encode()
    (write(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match=r"model\.safetensors to be a safetensors file"):
        load_checkpoint(tmp_path, dtype="float32")


@pytest.mark.parametrize("length", [2**63, 2**40, 99_000_000, 13])
def test_hostile_safetensors_header_lengths_are_refused(tmp_path, length):
    (write(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ValueError, match=r"model\.safetensors to be a safetensors file"):
        load_checkpoint(tmp_path, dtype="float32")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/secret.safetensors", "a\\b.safetensors", "weights.bin"])
def test_an_index_cannot_point_elsewhere(tmp_path, shard):
    directory = write(tmp_path / "model", shards=2)
    save_file(huggingface_tensors(random_params(TINY)), tmp_path / "secret.safetensors")
    index = directory / "model.safetensors.index.json"
    weight_map = dict.fromkeys(json.loads(index.read_text())["weight_map"], shard)
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="to name safetensors files beside it"):
        load_checkpoint(directory, dtype="float32")


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    index = write(tmp_path, shards=2) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"to agree with its shards, got .*model\.norm\.weight"):
        load_checkpoint(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_damaged_indices_are_refused(tmp_path, content):
    index = write(tmp_path, shards=2) / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=r"index\.json to"):
        load_checkpoint(tmp_path, dtype="float32")


def test_a_missing_shard_is_named(tmp_path):
    (write(tmp_path, shards=2) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        load_checkpoint(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": float("nan")},
        {"hidden_size": -32},
        {"num_hidden_layers": 2**60},
        {"num_hidden_layers": 1e300},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"vocab_size": float("inf")},
        {"rope_theta": float("-inf")},
        {"rope_scaling": 5},
        {"rope_scaling": {"rope_type": "unheard"}},
        {"model_type": "gpt2"},
    ],
)
def test_damaged_configs_are_refused(tmp_path, change):
    write(tmp_path, **change)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_checkpoint(tmp_path, dtype="float32")


def test_absurd_layer_counts_are_refused_before_anything_is_built(tmp_path):
    write(tmp_path, model_type="mistral", sliding_window=4, num_hidden_layers=2**40)
    with pytest.raises(ValueError, match=f"at most one layer for each tensor in .* got {2**40} for 21"):
        load_checkpoint(tmp_path, dtype="float32")


def test_numbers_that_overflow_to_infinity_are_refused(tmp_path):
    file = write(tmp_path, rms_norm_eps=0.125) / "config.json"
    file.write_text(file.read_text().replace("0.125", "1e999"))
    with pytest.raises(ValueError, match=r"config\.json to be JSON with finite numbers"):
        load_checkpoint(tmp_path, dtype="float32")
