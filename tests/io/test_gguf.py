import tracemalloc

import gguf
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
from gguf import GGMLQuantizationType as Kind

from specjax.io.checkpoint import load_checkpoint, load_config
from specjax.models.rope import static_frequencies
from specjax.models.transformer import Transformer

ENCODED = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
"""Types with blocks of 32 or less, which the gguf package also encodes."""


def write(
    path, config=TINY, *, params=None, architecture="llama", kind=Kind.F32, extra=(), drop=(), other=(), **changes
):
    """Writes the tiny model; `changes` go to the architecture's metadata, `other` to the rest of it."""
    metadata = gguf_metadata(config, architecture, **changes) | dict(other)
    params = random_params(config) if params is None else params
    tensors = gguf_tensors(params, paired=architecture == "llama") | dict(extra)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    return write_gguf(path / "model.gguf", metadata, tensors, kind=kind, architecture=architecture)


def logits(checkpoint):
    """Logits `[1, 6, V]` of one short text."""
    model = Transformer(checkpoint.config)
    cache = model.init_cache(checkpoint.params, 1, 8)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9]])
    return model.apply(checkpoint.params, tokens, jnp.arange(6)[None], cache)[0].logits


# ---- Case 52 ----


def test_case_52_paired_rows_of_llama_files_are_put_back(tmp_path):
    params = random_params(TINY)
    from_gguf = load_checkpoint(write(tmp_path, params=params), dtype="float32")
    write_huggingface(tmp_path / "hf", huggingface_config(TINY), huggingface_tensors(params))
    from_safetensors = load_checkpoint(tmp_path / "hf", dtype="float32")
    assert_same_params(from_gguf.params, params)
    assert_same_params(from_safetensors.params, params)
    np.testing.assert_allclose(logits(from_gguf), logits(from_safetensors), rtol=1e-6, atol=1e-6)


def test_case_52_query_and_key_biases_are_paired_too(tmp_path):
    config = tiny(attention_bias=True, attention_output_bias=True, mlp_bias=True)
    checkpoint = load_checkpoint(write(tmp_path, config), dtype="float32")
    assert_same_params(checkpoint.params, random_params(config))


def test_case_52_qwen2_files_are_not_paired(tmp_path):
    config = tiny(attention_bias=True)
    checkpoint = load_checkpoint(write(tmp_path, config, architecture="qwen2"), dtype="float32")
    assert_same_params(checkpoint.params, random_params(config))


@pytest.mark.parametrize("kind", ENCODED)
def test_case_52_quantised_rows_are_put_back_without_mixing_blocks(tmp_path, kind):
    """Each row decodes to what its own values give when encoded alone."""
    params = random_params(TINY)
    checkpoint = load_checkpoint(write(tmp_path, params=params, kind=kind), dtype="float32")

    def encoded(leaf):
        return gguf.dequantize(gguf.quantize(leaf, kind), kind) if leaf.ndim > 1 else leaf

    assert_same_params(checkpoint.params, jax.tree.map(encoded, params))


def test_large_tensors_are_decoded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.io.weights._BLOCK_ELEMENTS", 100)
    params = random_params(TINY)
    assert_same_params(load_checkpoint(write(tmp_path, params=params), dtype="float32").params, params)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.TQ1_0])
def test_types_that_are_only_decoded_load_as_the_package_decodes_them(tmp_path, kind):
    config = tiny(hidden_size=256, intermediate_size=256, num_layers=1)
    params = random_params(config)
    rows = np.random.default_rng(0).integers(0, 60, (256, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_gguf(
        tmp_path / "model.gguf",
        gguf_metadata(config, attention__key_length=8),
        gguf_tensors(params, paired=True),
        encoded={"blk.0.ffn_up.weight": (rows, kind)},
    )
    layer = load_checkpoint(path, dtype="float32").params["layers"][0]
    np.testing.assert_array_equal(layer["up"], gguf.dequantize(rows, kind))
    np.testing.assert_array_equal(layer["gate"], params["layers"][0]["gate"])


# ---- Case 53 ----

DIVISORS = np.array([1, 3.92699, 4, 4], np.float32)
SCALED = [1, 0.025465, 0.0025, 0.00025]


def test_case_53_llama3_scaling_is_the_same_from_the_config_and_from_rope_freqs(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    settings = huggingface_config(TINY, rope_scaling=scaling)
    write_huggingface(tmp_path / "hf", settings, huggingface_tensors(random_params(TINY)))
    path = write(tmp_path, extra={"rope_freqs.weight": DIVISORS})
    for config in (load_config(tmp_path / "hf"), load_config(path)):
        np.testing.assert_allclose(static_frequencies(config.rope, 8), SCALED, rtol=2e-5)
    assert_same_params(load_checkpoint(path, dtype="float32").params, random_params(TINY))


@pytest.mark.parametrize("metadata", [{"type": "linear", "factor": 4.0}, {"factor": 4.0}])
def test_case_53_linear_scaling_is_read_from_metadata(tmp_path, metadata):
    changes = {f"rope__scaling__{name}": value for name, value in metadata.items()}
    rope = load_config(write(tmp_path, **changes)).rope
    np.testing.assert_allclose(static_frequencies(rope, 8), [0.25, 0.025, 0.0025, 0.00025])


def test_case_53_yarn_scaling_is_read_from_metadata(tmp_path):
    changes = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0}
    rope = load_config(write(tmp_path, **{f"rope__scaling__{name}": value for name, value in changes.items()})).rope
    assert (rope.scaling, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)


@pytest.mark.parametrize("kind", ["longrope", "llama3", "unheard"])
def test_case_53_unknown_scaling_is_an_error(tmp_path, kind):
    with pytest.raises(ValueError, match=f"rope.scaling.type '{kind}'"):
        load_config(write(tmp_path, rope__scaling__type=kind, rope__scaling__factor=2.0))


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (DIVISORS[:3], r"of shape \[3\], not \[4\]"),
        (DIVISORS * np.nan, "not positive"),
        (-DIVISORS, "not positive"),
    ],
)
def test_damaged_rope_freqs_are_refused(tmp_path, divisors, message):
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, extra={"rope_freqs.weight": divisors}))


def test_rope_freqs_beside_another_scaling_is_refused(tmp_path):
    path = write(
        tmp_path, extra={"rope_freqs.weight": DIVISORS}, rope__scaling__type="linear", rope__scaling__factor=2.0
    )
    with pytest.raises(ValueError, match=r"together with the tensor 'rope_freqs\.weight'"):
        load_config(path)


# ---- Config ----


@pytest.mark.parametrize("tied", [False, True])
def test_the_config_is_that_of_the_same_model_in_a_hugging_face_directory(tmp_path, tied):
    config = tiny(tied_embeddings=tied, norm_epsilon=2.0**-16, head_dim=16)
    keys = {"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 16}
    params = random_params(config)
    write_huggingface(tmp_path / "hf", huggingface_config(config), huggingface_tensors(params))
    path = write(tmp_path, config, params=params, **keys)
    assert load_config(path) == load_config(tmp_path / "hf")


def test_the_vocabulary_size_defaults_to_the_rows_of_the_embedding(tmp_path):
    assert load_config(write(tmp_path, vocab_size=None)).vocab_size == 96


def test_a_sliding_window_holds_for_every_layer(tmp_path):
    assert load_config(write(tmp_path, attention__sliding_window=16)).sliding_windows == (16, 16)


def test_special_ids_are_read(tmp_path):
    ids = {"eos": 2, "eot": 7, "eom": 5, "bos": 1}
    checkpoint = load_checkpoint(
        write(tmp_path, other={f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}),
        dtype="float32",
    )
    assert checkpoint.eos_ids == (2, 5, 7)
    assert checkpoint.bos_id == 1


def test_special_ids_outside_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(ValueError, match="special token ids between 0 and 95"):
        load_checkpoint(write(tmp_path, other={"tokenizer.ggml.eos_token_id": 96}), dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": None}, "block_count None"),
        ({"block_count": 0}, "block_count 0"),
        ({"block_count": 2**32 - 1}, "at most one layer for each tensor"),
        ({"attention__head_count": 0}, "attention.head_count 0"),
        ({"attention__head_count": [4, 4]}, "attention.head_count"),
        ({"attention__head_count_kv": 3}, "multiple of num_kv_heads"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon nan"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon -1.0"),
        ({"rope__freq_base": float("inf")}, "rope.freq_base inf"),
        ({"rope__dimension_count": 4}, "rope.dimension_count 4, not the head width 8"),
        ({"attention__value_length": 4}, "attention.value_length 4, not the head width 8"),
        ({"expert_count": 8}, "not implemented: expert_count = 8"),
        ({"attention__causal": False}, "not implemented: attention.causal = False"),
        ({"rope__scaling__yarn_attn_factor": 2.0}, "not implemented: rope.scaling.yarn_attn_factor"),
        ({"attention__sliding_window_pattern": [1, 0]}, "not implemented: attention.sliding_window_pattern"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path, change, message):
    path = write(tmp_path, **change)
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(path, dtype="float32")
    assert str(path) in str(caught.value)


def test_absurd_head_counts_take_no_memory(tmp_path):
    path = write(tmp_path, attention__head_count=2**31, attention__head_count_kv=2**31, attention__key_length=2**20)
    tracemalloc.start()
    with pytest.raises(ValueError, match="8 misshapen"):
        load_checkpoint(path, dtype="float32")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_neutral_settings_are_accepted(tmp_path):
    other = {"split.count": 0}  # what is left after the parts of a model have been merged
    path = write(tmp_path, other=other, expert_count=0, attention__causal=True, rope__scaling__attn_factor=1.0)
    assert load_config(path).num_layers == 2


def test_other_architectures_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"architecture 'gemma', none of \['llama', 'qwen2'\]"):
        load_config(write(tmp_path, architecture="gemma"))


@pytest.mark.parametrize("count", [3, "3"])
def test_one_part_of_a_split_model_is_refused(tmp_path, count):
    with pytest.raises(ValueError, match="one part of a split model"):
        load_config(write(tmp_path, other={"split.count": count}))


# ---- Tensors ----


def test_one_error_names_all_that_is_wrong(tmp_path):
    extra = {"blk.0.attn_k.weight": np.zeros((32, 32), np.float32), "blk.0.extra.weight": np.zeros(32, np.float32)}
    path = write(tmp_path, extra=extra, drop=["blk.1.attn_norm.weight"])
    with pytest.raises(ValueError, match="expected the tensors") as caught:
        load_checkpoint(path, dtype="float32")
    message = str(caught.value)
    assert "1 missing (blk.1.attn_norm.weight)" in message
    assert "1 unexpected (blk.0.extra.weight)" in message
    assert "1 misshapen (blk.0.attn_k.weight [32, 32] instead of [16, 32])" in message


def test_a_bias_in_one_layer_only_is_an_error(tmp_path):
    config = tiny(attention_bias=True)
    with pytest.raises(ValueError, match=r"1 missing \(blk\.1\.attn_q\.bias\)"):
        load_checkpoint(write(tmp_path, config, drop=["blk.1.attn_q.bias"]), dtype="float32")


def test_types_that_the_package_cannot_decode_are_refused_by_name(tmp_path):
    path, name = write(tmp_path), b"blk.0.ffn_norm.weight"
    content = bytearray(path.read_bytes())
    content[content.index(name) + len(name) + 4 + 8] = Kind.I32  # after the number of dimensions and one size
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"does not decode: blk\.0\.ffn_norm\.weight \(I32\)"):
        load_checkpoint(path, dtype="float32")
