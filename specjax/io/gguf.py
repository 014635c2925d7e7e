"""GGUF files of the Llama family (architectures `llama` and `qwen2`), every quantisation the gguf package decodes."""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.io.gguf_header import GGUFHeader, GGUFTensor, read_header
from specjax.io.weights import Checkpoint, StoredTensor, check_ids, check_layers, load_params, shown, tensor_names
from specjax.models.config import RopeConfig, TransformerConfig

_TOP = {"embed": "token_embd", "norm": "output_norm", "unembed": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_INTERLEAVED = {"llama": True, "qwen2": False}
"""The architectures read, and whether their files store the rows of q and k in rotary pairs (0 4 1 5 2 6 3 7)."""
_FREQUENCIES = "rope_freqs.weight"
_NO_WEIGHT = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are not params: the divisors read into the config, and constants of old files."""
_NEUTRAL = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.sliding_window_pattern": None,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "use_parallel_residual": False,
    "rope.dimension_sections": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Settings that would change the law and are not implemented, each with the value at which it does not (None: none)."""
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def load(path: Path, dtype: np.dtype, sharding: Any) -> Checkpoint:
    """Loads a GGUF file. See `checkpoint.load_checkpoint`."""
    header, config = _open(path)
    tensors = _stored_tensors(path, header, config)
    names = tensor_names(config, _TOP, _LAYER, "blk.{}.")
    params = load_params(path, config, tensors, names, dtype=dtype, sharding=sharding)
    bos_ids = _special_ids(path, header, ("tokenizer.ggml.bos_token_id",), config.vocab_size)
    return Checkpoint(
        config=config,
        params=params,
        eos_ids=_special_ids(path, header, _END_KEYS, config.vocab_size),
        bos_id=bos_ids[0] if bos_ids else None,
        source=path,
    )


def read_config(path: Path) -> TransformerConfig:
    """The architecture of a GGUF file."""
    return _open(path)[1]


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file carries its tokenizer."""
    return "tokenizer.ggml.tokens" in read_header(path).metadata


def _open(path: Path) -> tuple[GGUFHeader, TransformerConfig]:
    header = read_header(path)
    try:
        _refuse_undecodable(header)
        return header, _read_config(path, header)
    except ValueError as error:
        raise ValueError(f"expected {path} to describe a supported model, got: {error}") from error


# ---- Metadata -> config ----


def _read_config(path: Path, header: GGUFHeader) -> TransformerConfig:
    settings = _settings(header)
    layers, heads = _integer(settings, "block_count"), _integer(settings, "attention.head_count")
    check_layers(path, layers, len(header.tensors))
    hidden, context = _integer(settings, "embedding_length"), _integer(settings, "context_length")
    head_dim = _head_dim(settings, hidden // heads)
    return TransformerConfig(
        vocab_size=_integer(settings, "vocab_size", _embedding_rows(header)),
        hidden_size=hidden,
        intermediate_size=_integer(settings, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(settings, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=context,
        norm_epsilon=_number(settings, "attention.layer_norm_rms_epsilon"),
        rope=_rope(settings, context, _frequency_factors(path, header, head_dim)),
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        tied_embeddings="output.weight" not in header.tensors,
        sliding_windows=_sliding_windows(settings, layers),
    )


def _settings(header: GGUFHeader) -> dict[str, Any]:
    """The metadata of the file's architecture, without its prefix."""
    architecture = str(header.metadata.get("general.architecture"))
    if architecture not in _INTERLEAVED:
        raise ValueError(f"architecture {architecture!r}, none of {sorted(_INTERLEAVED)}")
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise ValueError("one part of a split model: merge its parts into one file first")
    start = f"{architecture}."
    settings = {key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)}
    _refuse_unsupported(settings)
    return settings


def _refuse_unsupported(settings: Mapping[str, Any]) -> None:
    present = [(name, settings[name], neutral) for name, neutral in _NEUTRAL.items() if name in settings]
    wrong = [f"{name} = {value}" for name, value, neutral in present if np.any(value != neutral)]
    if wrong:
        raise ValueError(f"settings that are not implemented: {shown(wrong)}")


def _embedding_rows(header: GGUFHeader) -> int | None:
    embedding = header.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else None


def _head_dim(settings: Mapping[str, Any], default: int) -> int:
    head_dim = _integer(settings, "attention.key_length", default)
    for name in ("attention.value_length", "rope.dimension_count"):
        if _integer(settings, name, head_dim) != head_dim:
            raise ValueError(f"{name} {settings[name]}, not the head width {head_dim}")
    return head_dim


def _rope(settings: Mapping[str, Any], context: int, factors: tuple[float, ...] | None) -> RopeConfig:
    """A factor without a type is linear scaling, as llama.cpp reads it; `rope_freqs` goes with no other scaling."""
    legacy = _number(settings, "rope.scale_linear", 1.0)
    factor = _number(settings, "rope.scaling.factor", legacy)
    kind = settings.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r}, none of 'none', 'linear', 'yarn'")
    if factors and kind != "none":
        raise ValueError(f"rope.scaling.type {kind!r} together with the tensor {_FREQUENCIES!r}")
    return RopeConfig(
        theta=_number(settings, "rope.freq_base", 10000.0),
        scaling="default" if kind == "none" else kind,
        factor=1.0 if kind == "none" else factor,
        original_max_positions=_integer(settings, "rope.scaling.original_context_length", context),
        beta_fast=_number(settings, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(settings, "rope.scaling.yarn_beta_slow", 1.0),
        frequency_factors=factors,
    )


def _frequency_factors(path: Path, header: GGUFHeader, head_dim: int) -> tuple[float, ...] | None:
    tensor = header.tensors.get(_FREQUENCIES)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise ValueError(f"{_FREQUENCIES!r} of shape {list(tensor.shape)}, not [{head_dim // 2}]")
    factors = _read_rows(path, tensor, 0, head_dim // 2)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise ValueError(f"{_FREQUENCIES!r} with divisors that are not positive")
    return tuple(float(factor) for factor in factors)


def _sliding_windows(settings: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    if not settings.get("attention.sliding_window"):
        return None
    return (_integer(settings, "attention.sliding_window"),) * layers


def _integer(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = settings.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} {value!r}, not a positive integer")
    return value


def _number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = settings.get(name, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} {value!r}, not a positive number")
    return float(value)


def _special_ids(path: Path, header: GGUFHeader, keys: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
    return check_ids(path, [header.metadata[key] for key in keys if key in header.metadata], vocab_size)


# ---- Tensors ----


def _stored_tensors(path: Path, header: GGUFHeader, config: TransformerConfig) -> dict[str, StoredTensor]:
    interleaved = _INTERLEAVED[header.metadata["general.architecture"]]
    return {
        name: StoredTensor(
            shape=tensor.shape,
            read=functools.partial(_read_rows, path, tensor),
            row_order=_row_order(name, tensor.shape[0], config) if interleaved else None,
        )
        for name, tensor in header.tensors.items()
        if not _NO_WEIGHT.fullmatch(name)
    }


def _row_order(name: str, rows: int, config: TransformerConfig) -> np.ndarray | None:
    """Places in the model of the stored rows of q and k, whose halves the converter interleaves head by head."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if match is None:
        return None
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    if rows != heads * config.head_dim:
        return None  # misshapen, which is reported with all the others
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()


def _read_rows(path: Path, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
    """Decodes rows `start` to `stop`; quantisation blocks never span rows. Vectors are one row, read whole."""
    matrix = len(tensor.shape) > 1
    row_bytes = tensor.num_bytes // tensor.shape[0] if matrix else tensor.num_bytes
    first, last = (start, stop) if matrix else (0, 1)
    offset = tensor.offset + first * row_bytes
    raw = np.fromfile(path, np.uint8, count=(last - first) * row_bytes, offset=offset)
    rows = gguf.dequantize(raw.reshape(last - first, row_bytes), tensor.kind)
    return rows if matrix else rows.ravel()


def _refuse_undecodable(header: GGUFHeader) -> None:
    wrong = [f"{name} ({tensor.kind.name})" for name, tensor in header.tensors.items() if not _can_decode(tensor.kind)]
    if wrong:
        raise ValueError(f"tensors of types that the gguf package does not decode: {shown(wrong)}")


@functools.cache
def _can_decode(kind: gguf.GGMLQuantizationType) -> bool:
    """Tries one block of zeros: the gguf package has no list of what it decodes."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
