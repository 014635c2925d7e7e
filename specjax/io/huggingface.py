"""Hugging Face directories: `config.json` and safetensors, in one file or in shards with an index."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.io.files import read_json
from specjax.io.weights import (
    Checkpoint,
    StoredTensor,
    check_ids,
    check_layers,
    load_params,
    same_values,
    shown,
    tensor_names,
)
from specjax.models.config import TransformerConfig, from_huggingface

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "unembed": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_DTYPES = ("BF16", "F16", "F32", "F64")
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "causal_mask",
    "self_attn.bias",
    "self_attn.masked_bias",
)
"""Name endings of constants that older versions of transformers saved with the weights."""


def load(directory: Path, dtype: np.dtype, sharding: Any) -> Checkpoint:
    """Loads a Hugging Face directory. See `checkpoint.load_checkpoint`."""
    config, tensors = _open(directory)
    names = tensor_names(config, _TOP, _LAYER, "model.layers.{}.")
    params = load_params(directory, config, tensors, names, dtype=dtype, sharding=sharding)
    bos_ids = _special_ids(directory, "bos_token_id", config.vocab_size)
    return Checkpoint(
        config=config,
        params=params,
        eos_ids=_special_ids(directory, "eos_token_id", config.vocab_size),
        bos_id=bos_ids[0] if bos_ids else None,
        source=directory,
    )


def to_state_dict(config: TransformerConfig, params: Any) -> dict[str, Any]:
    """The params by their Hugging Face tensor names."""
    names = tensor_names(config, _TOP, _LAYER, "model.layers.{}.")
    return dict(zip(jax.tree.leaves(names), jax.tree.leaves(params), strict=True))


def read_config(directory: Path) -> TransformerConfig:
    """The architecture of a Hugging Face directory."""
    return _open(directory)[0]


def _open(directory: Path) -> tuple[TransformerConfig, dict[str, StoredTensor]]:
    tensors = _find_tensors(directory)
    path = directory / "config.json"
    settings = read_json(path)
    check_layers(directory, settings.get("num_hidden_layers"), len(tensors))
    try:
        config = from_huggingface(settings)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"expected {path} to describe a supported model, got: {error}") from error
    return _resolve_tie(config, tensors)


def _resolve_tie(
    config: TransformerConfig, tensors: dict[str, StoredTensor]
) -> tuple[TransformerConfig, dict[str, StoredTensor]]:
    """Settles what `tie_word_embeddings` means for the tensors found, as transformers does.

    A lone tensor serves both ends; two equal ones are tied; two different ones are both kept, whatever the config says.
    """
    if not config.tied_embeddings or _HEAD not in tensors:
        return config, tensors
    embed = tensors.get(_EMBED, tensors[_HEAD])
    if not same_values(embed, tensors[_HEAD]):
        return dataclasses.replace(config, tied_embeddings=False), tensors
    return config, {name: tensor for name, tensor in tensors.items() if name != _HEAD} | {_EMBED: embed}


def _find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory, by name, without the known buffers."""
    single = directory / WEIGHTS
    tensors = _read_header(single) if single.is_file() else _read_shards(directory / INDEX)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_BUFFERS)}


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"expected {index} to map tensor names to shard files in 'weight_map', got {weight_map!r:.80}")
    outside = [shard for shard in weight_map.values() if not _is_plain(shard)]
    if outside:
        raise ValueError(f"expected {index} to name safetensors files beside it, got {shown(outside)}")
    shards = {shard: _read_header(index.parent / shard) for shard in sorted(set(weight_map.values()))}
    found = {(name, shard) for shard, tensors in shards.items() for name in tensors}
    differing = sorted(name for name, _ in found ^ set(weight_map.items()))
    if differing:
        raise ValueError(f"expected {index} to agree with its shards, got {len(differing)} other: {shown(differing)}")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _is_plain(shard: str) -> bool:
    """Whether a shard's name stays in its directory (no separators, drives or parents)."""
    return shard.endswith(".safetensors") and not any(mark in shard for mark in "/\\:\0")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; its header is checked against its size by the safetensors package."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            kinds = {name: part.get_dtype() for name, part in slices.items() if not name.endswith(_BUFFERS)}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"expected {path} to be a safetensors file, got: {error}") from error
    wrong = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in _DTYPES]
    if wrong:
        raise ValueError(f"expected tensors of {_DTYPES} in {path}, got {shown(wrong)}; quantised: use a GGUF file")
    return {
        name: StoredTensor(
            shape=shape,
            read=functools.partial(_read_rows, path, name),
            read_block=functools.partial(_read_block, path, name),
        )
        for name, shape in shapes.items()
    }


def _read_rows(path: Path, name: str, start: int, stop: int) -> np.ndarray:
    """Opens the file for these rows alone, so that no more of it than that stays mapped."""
    with safe_open(path, framework="numpy") as file:
        return file.get_slice(name)[start:stop]


def _read_block(path: Path, name: str, rows: slice, columns: slice) -> np.ndarray:
    """The same for some columns of a matrix."""
    with safe_open(path, framework="numpy") as file:
        return file.get_slice(name)[rows, columns]


def _special_ids(directory: Path, name: str, vocab_size: int) -> tuple[int, ...]:
    """Ids (one or a list) from `generation_config.json` if it names any, else from `config.json`."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        value = read_json(path).get(name) if path.is_file() else None
        if value is not None:
            return check_ids(path, value if isinstance(value, list) else [value], vocab_size)
    return ()
