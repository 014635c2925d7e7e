"""The key/value cache: a buffer addressed by position, rolled back by lowering its length."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import KVCache


def init_cache(batch_size: int, capacity: int, heads: int, width: int, num_layers: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `num_layers` layers of `[batch_size, heads, capacity, width]` keys and values."""

    def buffers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((batch_size, heads, capacity, width), dtype) for _ in range(num_layers))

    return KVCache(keys=buffers(), values=buffers(), length=jnp.zeros((batch_size,), jnp.int32))


def append(
    cache: KVCache, entries: list[tuple[jax.Array, jax.Array]], positions: jax.Array, hidden: jax.Array
) -> KVCache:
    """Writes the keys and values of T tokens a row at their positions; those at position -1 are dropped.

    Writes outside the buffer are dropped too, never clamped onto valid slots. A token whose pass through the model
    broke (NaN or inf) is stored as value 0 under a NaN key: while its slot is stale it cannot leak (0 * NaN) into a
    query that masks it, and a query that does see it gets NaN. That check also orders every write after the last
    read of the cache, without which XLA copies each buffer.

    Args:
      cache: the cache; `length` is left as it is.
      entries: keys and values `[B, heads, T, D]` of each layer.
      positions: `[B, T]` int32.
      hidden: `[B, T, E]`, the model's last hidden state.
    """
    capacity = cache.keys[0].shape[2]
    slots = jnp.where(positions < 0, capacity, positions)
    if slots.size == 1:  # XLA:CPU turns a one-token scatter into an update that copies the buffer
        slots = jnp.pad(slots, ((0, 0), (0, 1)), constant_values=capacity)
    rows = jnp.arange(slots.shape[0])[:, None]
    finite = jnp.isfinite(hidden).all(axis=-1)[:, None, :, None]

    def write(buffer: jax.Array, new: jax.Array, broken: float) -> jax.Array:
        new = jnp.where(finite, new, broken).swapaxes(1, 2).astype(buffer.dtype)
        new = jnp.pad(new, ((0, 0), (0, slots.shape[1] - new.shape[1]), (0, 0), (0, 0)))
        bits = jnp.dtype(f"uint{8 * buffer.dtype.itemsize}")  # XLA:CPU widens a bfloat16 scatter's whole buffer
        written = lax.bitcast_convert_type(buffer, bits).at[rows, :, slots]
        return lax.bitcast_convert_type(written.set(lax.bitcast_convert_type(new, bits), mode="drop"), buffer.dtype)

    keys = tuple(write(old, new, jnp.nan) for old, (new, _) in zip(cache.keys, entries, strict=True))
    values = tuple(write(old, new, 0) for old, (_, new) in zip(cache.values, entries, strict=True))
    return dataclasses.replace(cache, keys=keys, values=values)
