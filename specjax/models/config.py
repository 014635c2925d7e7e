"""Architecture hyper-parameters of the Llama family, read from public `config.json` files."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its context-extension scaling.

    References:
      RoPE, arXiv 2104.09864; YaRN (and dynamic NTK), arXiv 2309.00071.
    """

    theta: float = 10000.0
    scaling: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None
    """Per-frequency divisors that override `scaling` (the `rope_freqs` tensor of a GGUF file)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated MLP. Hashable, hence a jit static."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float = 1e-5
    rope: RopeConfig = RopeConfig()
    activation: Activation = "silu"
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
    """One window (in tokens, the query included) or None for each layer; None: every layer sees everything."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        for name, number in (
            ("norm_epsilon", self.norm_epsilon),
            ("theta", self.rope.theta),
            ("factor", self.rope.factor),
        ):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"expected {name} to be finite and above 0, got {number}")
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim (rotary pairs), got {self.head_dim}")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"expected one sliding window per layer ({self.num_layers}), got {len(self.sliding_windows)}"
            )


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "max_window_layers": 28},
}
"""What a config of each model type means by leaving a key out."""


def from_huggingface(config: Mapping[str, Any]) -> TransformerConfig:
    """Reads a Hugging Face `config.json` of the Llama family (llama, mistral, qwen2).

    Args:
      config: the parsed JSON object.

    Returns:
      The equivalent `TransformerConfig`.

    Raises:
      ValueError: a model type, activation, rope type or option that would change the law and is not implemented.
    """
    model_type = config.get("model_type")
    if model_type not in _DEFAULTS:
        raise ValueError(f"expected model_type to be one of {sorted(_DEFAULTS)}, got {model_type!r}")
    config = _DEFAULTS[model_type] | dict(config)
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"expected hidden_act to be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    qwen = model_type == "qwen2"
    bias = bool(config.get("attention_bias", qwen))
    max_positions = _positive(config, "max_position_embeddings")
    rope = rope_from_huggingface(config, max_positions)
    return TransformerConfig(
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_positive(config, "num_key_value_heads", heads),
        head_dim=_positive(config, "head_dim", hidden // heads),
        max_positions=int(rope.factor * max_positions) if rope.scaling == "dynamic" else max_positions,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        activation=_ACTIVATIONS[activation],
        attention_bias=bias,
        attention_output_bias=bias and not qwen,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_windows=_sliding_windows(config),
    )


def rope_from_huggingface(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads the rotary settings from either place they are published in (`rope_parameters`, or the top level).

    Raises:
      ValueError: an unknown rope type, or a missing factor.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling and all(isinstance(value, Mapping) for value in scaling.values()):
        raise ValueError(f"expected one rope setting for all layers, got one per layer type: {sorted(scaling)}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    known = ("default", "linear", "dynamic", "llama3", "yarn")
    if rope_type not in known:
        raise ValueError(f"expected rope_type to be one of {known}, got {rope_type!r}")
    if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("expected partial_rotary_factor 1.0: partial rotary embeddings are not implemented")
    original = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    original = int(original or max_positions) if rope_type != "dynamic" else max_positions
    factor = scaling.get("factor")
    if factor is None and rope_type == "yarn":
        factor = max_positions / original
    if factor is None and rope_type != "default":
        raise ValueError(f"expected a 'factor' beside rope_type {rope_type!r}, got {dict(scaling)}")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    return RopeConfig(
        theta=float(theta),
        scaling=rope_type,
        factor=1.0 if factor is None else float(factor),
        original_max_positions=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_optional_float(scaling.get("attention_factor")),
        mscale=_optional_float(scaling.get("mscale")),
        mscale_all_dim=_optional_float(scaling.get("mscale_all_dim")),
        truncate=bool(scaling.get("truncate", True)),
    )


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not math.isfinite(number) or number < 1 or number != int(number):
        raise ValueError(f"expected {name} to be a positive integer, got {value!r}")
    return int(number)


def _sliding_windows(config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    layers, window = _positive(config, "num_hidden_layers"), config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", config["model_type"] == "mistral"):
        return None
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config["max_window_layers"]) if config["model_type"] == "qwen2" else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    known = {"sliding_attention": int(window), "full_attention": None}
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"expected {layers} layer_types among {sorted(known)}, got {len(kinds)} with unknown {unknown}"
        )
    return tuple(known[kind] for kind in kinds)
