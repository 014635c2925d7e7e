"""An independent transformer for the tests: NumPy in float64, one text at a time, no cache.

References:
  RoPE, arXiv 2104.09864; YaRN and dynamic NTK, arXiv 2309.00071; grouped queries, arXiv 2305.13245.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.models.config import RopeConfig, TransformerConfig


def forward(params: Any, config: TransformerConfig, tokens: Sequence[int]) -> np.ndarray:
    """Logits `[T, V]` of one text."""
    final = rms_norm(hidden_states(params, config, tokens)[-1], params["norm"], config.norm_epsilon)
    return final @ _f64(params.get("unembed", params["embed"])).T


def hidden_states(params: Any, config: TransformerConfig, tokens: Sequence[int]) -> list[np.ndarray]:
    """The residual stream `[T, E]` entering each layer, and last the one that leaves the last layer."""
    states = [_f64(params["embed"])[np.asarray(tokens)]]
    windows = config.sliding_windows or (None,) * config.num_layers
    for layer, window in zip(params["layers"], windows, strict=True):
        hidden = states[-1]
        hidden = hidden + attention(
            layer, config, rms_norm(hidden, layer["attention_norm"], config.norm_epsilon), window
        )
        hidden = hidden + mlp(layer, config, rms_norm(hidden, layer["mlp_norm"], config.norm_epsilon))
        states.append(hidden)
    return states


def rms_norm(hidden: np.ndarray, weight: Any, epsilon: float) -> np.ndarray:
    """Divides each row by its root mean square, then scales."""
    return hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + epsilon) * _f64(weight)


def attention(layer: Any, config: TransformerConfig, hidden: np.ndarray, window: int | None) -> np.ndarray:
    """Causal attention over one text `[T, E]`; query head h reads KV head h // (num_heads // num_kv_heads)."""
    length, width = len(hidden), config.head_dim
    query, key, value = (linear(layer, name, hidden).reshape(length, -1, width) for name in "qkv")
    query, key = rotate(query, config.rope), rotate(key, config.rope)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (window or length))
    mixed = np.zeros_like(query)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        scores = np.where(visible, query[:, head] @ key[:, kv_head].T / math.sqrt(width), -np.inf)
        mixed[:, head] = softmax(scores) @ value[:, kv_head]
    return linear(layer, "o", mixed.reshape(length, -1))


def mlp(layer: Any, config: TransformerConfig, hidden: np.ndarray) -> np.ndarray:
    """down(activation(gate(x)) * up(x))."""
    gate = _ACTIVATIONS[config.activation](linear(layer, "gate", hidden))
    return linear(layer, "down", gate * linear(layer, "up", hidden))


def linear(layer: Any, name: str, hidden: np.ndarray) -> np.ndarray:
    """A matrix stored `[out, in]`, and its bias if the layer has one."""
    out = hidden @ _f64(layer[name]).T
    return out + _f64(layer[f"{name}_bias"]) if f"{name}_bias" in layer else out


def softmax(scores: np.ndarray) -> np.ndarray:
    """Along the last axis; -inf gives exactly 0."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def _f64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


# ---- Rotary positions ----


def rotate(heads: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Rotates `[T, heads, D]`: element i of the first half pairs with element i of the second half."""
    half, turned = heads.shape[-1] // 2, np.empty_like(heads)
    for position, (first, second) in enumerate(zip(heads[..., :half], heads[..., half:], strict=True)):
        angle = position * inverse_frequencies(rope, 2 * half, position + 1)
        cos, sin = np.cos(angle) * rope_magnitude(rope), np.sin(angle) * rope_magnitude(rope)
        turned[position] = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> np.ndarray:
    """`[D / 2]` radians per token. The token at position t uses those of `length` t + 1, however text is cut."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    plain = rope.theta**-exponents
    if rope.frequency_factors is not None:
        return plain / np.array(rope.frequency_factors)
    if rope.scaling == "default":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "dynamic":
        return dynamic_theta(rope, head_dim, length) ** -exponents
    if rope.scaling == "llama3":
        return np.array([llama3_frequency(rope, frequency) for frequency in plain])
    if rope.scaling == "yarn":
        ramp = yarn_ramp(rope, head_dim)
        return ramp * plain / rope.factor + (1 - ramp) * plain
    raise ValueError(f"expected a known rope scaling, got {rope.scaling!r}")


def dynamic_theta(rope: RopeConfig, head_dim: int, length: int) -> float:
    """NTK-aware base, grown by how far the text exceeds the original length."""
    stretch = rope.factor * max(length / original_length(rope), 1.0) - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def llama3_frequency(rope: RopeConfig, frequency: float) -> float:
    """High frequencies are kept, low ones divided by the factor, those between interpolated by turns."""
    turns = original_length(rope) * frequency / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = min(max(share, 0.0), 1.0)
    return share * frequency + (1 - share) * frequency / rope.factor


def yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """`[D / 2]`: 0 where a frequency is kept, 1 where it is divided by the factor, linear in the index between."""

    def index(turns: float) -> float:
        return head_dim * math.log(original_length(rope) / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)


def original_length(rope: RopeConfig) -> int:
    """The length the model was trained with before its context was extended."""
    if rope.original_max_positions is None:
        raise ValueError(f"expected original_max_positions for {rope.scaling} scaling, got None: set it in RopeConfig")
    return rope.original_max_positions


def rope_magnitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's temperature, 1 otherwise."""
    if rope.scaling != "yarn" or rope.frequency_factors is not None:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * log_factor + 1) / (0.1 * rope.mscale_all_dim * log_factor + 1)
    return 0.1 * log_factor + 1
