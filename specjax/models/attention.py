"""Grouped-query attention over a cache that is only read, plus the block of new tokens."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from specjax.cache import read

SHORTEST = 256
"""Slots of the smallest prefix of a cache that gets a program of its own."""
MASKED = jnp.finfo(jnp.float32).min / 2
"""Score of what a query may not see: finite, so that a query that sees nothing yields numbers, not NaN."""


def attend(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention of T new tokens a row over the slots before them and over themselves.

    Old and new keys meet only in the softmax's maximum and sum (as in online softmax, arXiv 1805.02867), so that the
    cache is not written, copied or concatenated here.

    Of the buffer only a static prefix is read, the smallest that holds the longest row.

    Args:
      query: `[B, T, H, D]`, rotated.
      new: keys and values `[B, G, T, D]` of the T tokens.
      cached: buffers of keys and values `[B, G, S, D]` as `KVCache` stores them; slots from the first new position on
        are stale and not seen.
      positions: `[B, T]` int32, -1 for padding.
      window: sliding window in tokens, the query included; None sees everything.

    Returns:
      `[B, T, H * D]` float32.
    """
    new = _quarantine(*new)
    sizes = prefixes(cached[0].shape[2])
    branches = [partial(_attend, size=size, window=window) for size in sizes]
    smallest = jnp.searchsorted(jnp.asarray(sizes), positions[:, 0].max())
    return lax.switch(jnp.minimum(smallest, len(sizes) - 1), branches, query, new, cached, positions)


def prefixes(capacity: int) -> list[int]:
    """Static sizes to read, each twice the last; what saves little is left out, since each is code to compile."""
    sizes = [SHORTEST]
    while 2 * sizes[-1] < capacity:
        sizes.append(2 * sizes[-1])
    return [size for size in sizes if 4 * size < 3 * capacity] + [capacity]


def _attend(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    size: int,
    window: int | None,
) -> jax.Array:
    keys, values = (read(buffer[:, :, :size]) for buffer in cached)
    grouped = _group(query, new[0])
    slots = jnp.arange(size)
    old_scores = _scores(grouped, keys, _visible(positions, slots[None], positions[:, :1], window))
    last = jnp.full_like(positions[:, -1:], jnp.iinfo(jnp.int32).max)
    new_scores = _scores(grouped, new[0], _visible(positions, positions, last, window))
    peak = jnp.maximum(old_scores.max(-1, keepdims=True), new_scores.max(-1, keepdims=True))
    old_weights, new_weights = jnp.exp(old_scores - peak), jnp.exp(new_scores - peak)
    total = old_weights.sum(-1, keepdims=True) + new_weights.sum(-1, keepdims=True)
    mixed = _mix(old_weights, values) + _mix(new_weights, new[1])
    return _ungroup(mixed / _flat(total), query)


def _quarantine(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeroes values that are not finite under a NaN key: 0 * NaN must not reach a query that masks them."""
    broken = ~jnp.isfinite(values).all(axis=-1, keepdims=True)
    return jnp.where(broken, jnp.nan, keys), jnp.where(broken, 0, values)


def _visible(positions: jax.Array, slots: jax.Array, end: jax.Array, window: int | None) -> jax.Array:
    """`[B, T, S]`: slot s is seen by a query at t if 0 <= s <= t, s < end and s > t - window."""
    query, key = positions[:, :, None], slots[:, None, :]
    seen = (key >= 0) & (key <= query) & (key < end[:, None])
    return seen if window is None else seen & (key > query - window)


def _group(query: jax.Array, keys: jax.Array) -> jax.Array:
    """`[B, T, H, D]` -> `[B, G, H / G, T, D]`, scaled and in the dtype of the keys."""
    batch, length, heads, width = query.shape
    grouped = query.reshape(batch, length, keys.shape[1], heads // keys.shape[1], width) * width**-0.5
    return grouped.transpose(0, 2, 3, 1, 4).astype(keys.dtype)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(query: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
    contract = (((3,), (3,)), ((0, 1), (0, 1)))
    scores = lax.dot_general(_flat(query), keys, contract, preferred_element_type=jnp.float32)
    scores = scores.reshape(*query.shape[:-1], keys.shape[2])
    return jnp.where(visible[:, None, None], scores, MASKED)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    contract = (((3,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(_flat(weights).astype(values.dtype), values, contract, preferred_element_type=jnp.float32)


def _ungroup(mixed: jax.Array, query: jax.Array) -> jax.Array:
    """`[B, G, H / G * T, D]` -> `[B, T, H * D]`."""
    batch, length, heads, width = query.shape
    mixed = mixed.reshape(batch, heads, length, width)
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)
