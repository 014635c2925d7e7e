"""Tiny models written by hand in the formats that the library reads."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import save_file

from specjax.models.config import TransformerConfig
from specjax.models.params import init_params

TINY = TransformerConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)

PAIRED_ROWS = (0, 4, 1, 5, 2, 6, 3, 7)
"""How llama-labelled GGUF files order the 8 rows of a head (case 52)."""


def tiny(**changes: Any) -> TransformerConfig:
    """The tiny model with other settings."""
    return dataclasses.replace(TINY, **changes)


@functools.cache
def random_params(config: TransformerConfig, seed: int = 0) -> Any:
    """Random params on the host, norms too, so that no two tensors are alike. Not to be changed."""
    generator = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    return jax.tree.map(lambda leaf: generator.normal(0.1, 0.2, leaf.shape).astype(np.float32), shapes)


# ---- Hugging Face ----

_HF_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def huggingface_tensors(params: Any) -> dict[str, np.ndarray]:
    """The params under their Hugging Face names."""
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if "unembed" in params:
        tensors["lm_head.weight"] = params["unembed"]
    for index, layer in enumerate(params["layers"]):
        tensors |= {f"model.layers.{index}.{_HF_LAYER[name]}": leaf for name, leaf in layer.items()}
    return tensors


def huggingface_config(config: TransformerConfig, **changes: Any) -> dict[str, Any]:
    """A `config.json` for the model; `changes` override it, None removes."""
    settings = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
    }
    return {name: value for name, value in (settings | changes).items() if value is not None}


def write_huggingface(
    directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1
) -> Path:
    """Writes `config.json` and the tensors, in one file or dealt out to shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    weight_map = {name: files[index % shards] for index, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


# ---- GGUF ----

_GGUF_LAYER = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}


def gguf_tensors(params: Any, *, paired: bool) -> dict[str, np.ndarray]:
    """The params under their GGUF names; `paired` reorders the rows of q and k as llama-labelled files do."""
    tensors = {"token_embd.weight": params["embed"], "output_norm.weight": params["norm"]}
    if "unembed" in params:
        tensors["output.weight"] = params["unembed"]
    for index, layer in enumerate(params["layers"]):
        for name, leaf in layer.items():
            rows = pair_rows(leaf) if paired and name in ("q", "k", "q_bias", "k_bias") else leaf
            tensors[f"blk.{index}.{_GGUF_LAYER[name]}"] = rows
    return tensors


def pair_rows(leaf: np.ndarray) -> np.ndarray:
    """Reorders the rows of each head of 8."""
    heads = [leaf[start : start + 8][list(PAIRED_ROWS)] for start in range(0, len(leaf), 8)]
    return np.concatenate(heads)


def gguf_metadata(config: TransformerConfig, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata of the model; `changes` (dots written `__`) override it, None removes. Keys get the prefix."""
    settings = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{architecture}.{name}": value for name, value in settings.items() if value is not None}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    encoded: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Writes a GGUF file, matrices in the type `kind`, vectors in float32, those of `encoded` as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        rows, stored = (encoded or {}).get(name) or (gguf.quantize(np.ascontiguousarray(tensor), stored), stored)
        writer.add_tensor(name, rows, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_params(actual: Any, expected: Any) -> None:
    """Equal structure, shapes, dtypes and bits."""
    paths, treedef = jax.tree.flatten_with_path(expected)
    leaves, actual_treedef = jax.tree.flatten(actual)
    assert actual_treedef == treedef
    for (path, leaf), other in zip(paths, leaves, strict=True):
        leaf, other = np.asarray(leaf), np.asarray(other)
        assert leaf.dtype == other.dtype, path
        assert leaf.shape == other.shape, path
        assert leaf.tobytes() == other.tobytes(), path
