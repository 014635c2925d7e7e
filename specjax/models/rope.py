"""Rotary position embeddings with every scaling that public Llama-family configs use (arXiv 2104.09864, 2309.00071)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import RopeConfig


def rotations(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., D / 2]` float32 for integer `positions` `[...]`, computed, never looked up in a table.

    The rotation of a position depends on that position alone, so text cut into other calls rotates the same.
    """
    positions = jnp.maximum(positions, 0).astype(jnp.float32)
    angles = positions[..., None] * _inverse_frequencies(rope, head_dim, positions)
    scale = attention_scale(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `[B, T, H, D]` by `[B, T, D / 2]`; pairs are (i, i + D / 2), the layout of Hugging Face checkpoints."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention_scale(rope: RopeConfig) -> float:
    """Factor on cosines and sines: YaRN's attention temperature (arXiv 2309.00071, 3.4), 1 for the others."""
    if rope.scaling != "yarn" or rope.frequency_factors is not None:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _inverse_frequencies(rope: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """`[D / 2]`, or `[..., D / 2]` where the scaling depends on the position (dynamic NTK)."""
    if rope.frequency_factors is None and rope.scaling == "dynamic":
        return _dynamic(rope, head_dim, positions)
    return jnp.asarray(static_frequencies(rope, head_dim), jnp.float32)


def static_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """`[D / 2]` float64 inverse frequencies of every scaling that does not depend on the position."""
    base = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.frequency_factors is not None:
        return base / np.asarray(rope.frequency_factors)
    return {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.scaling](rope, base)


def _plain(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    return base


def _linear(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    return base / rope.factor


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Three zones by wavelength: kept, divided, and a linear blend between."""
    turns = _original(rope) * base / (2 * math.pi)
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - smooth) * base / rope.factor + smooth * base


def _yarn(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Blend of interpolation and extrapolation by the number of turns within the original length (2309.00071, 3.2)."""
    size = 2 * len(base)

    def dimension(turns: float) -> float:
        return size * math.log(_original(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(len(base)) - low) / max(high - low, 0.001), 0, 1)
    return base * (1 - ramp) + base / rope.factor * ramp


def _dynamic(rope: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """NTK by length: a token at position t is rotated as the last one of a text of t + 1 tokens."""
    original = _original(rope)
    length = jnp.maximum(positions + 1, original)
    growth = rope.factor * length / original - (rope.factor - 1)
    theta = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponent = jnp.asarray(np.arange(0, head_dim, 2) / head_dim, jnp.float32)
    return theta[..., None] ** -exponent


def _original(rope: RopeConfig) -> int:
    if rope.original_max_positions is None:
        raise ValueError(f"expected original_max_positions beside {rope.scaling!r} scaling, got None")
    return rope.original_max_positions
