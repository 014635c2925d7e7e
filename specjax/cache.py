"""The key/value cache: a buffer addressed by position, rolled back by lowering its length."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import KVCache

TILE = 16
"""Buffers have a multiple of so many slots: what a TPU lays out together of 16-bit numbers. If the last tile were not
full, it would rather have rows next to each other in tiles, and copy every buffer to that layout and back in each
step."""


def init_cache(batch_size: int, capacity: int, heads: int, width: int, num_layers: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `num_layers` layers of `[batch_size, heads, S, width]` keys and values, S at least `capacity`.

    bfloat16 is stored as its bits (uint16), which `read` undoes: XLA:CPU widens the whole buffer to write one slot of
    a bfloat16 array.
    """
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    capacity = -(-capacity // TILE) * TILE

    def buffers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((batch_size, heads, capacity, width), stored) for _ in range(num_layers))

    return KVCache(keys=buffers(), values=buffers(), length=jnp.zeros((batch_size,), jnp.int32))


def read(buffer: jax.Array) -> jax.Array:
    """A buffer's numbers, in the dtype that `init_cache` was asked for."""
    return lax.bitcast_convert_type(buffer, jnp.bfloat16) if buffer.dtype == jnp.uint16 else buffer


def stored(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What a buffer of `dtype` holds for these numbers: the opposite of `read`."""
    bits = dtype == jnp.uint16
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), dtype) if bits else values.astype(dtype)


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
      positions: `[B, T]` int32, consecutive in each row, -1 only behind real tokens.
      hidden: `[B, T, E]`, the model's last hidden state.

    Raises:
      ValueError: more tokens than slots.
    """
    capacity = cache.keys[0].shape[2]
    if positions.shape[1] > capacity:
        raise ValueError(f"expected at most {capacity} tokens (the cache's capacity), got {positions.shape[1]}")
    finite = jnp.isfinite(hidden).all(axis=-1)[:, None, :, None]
    kinds = jnp.nan, 0
    new = [
        tuple(stored(jnp.where(finite, entry, broken), buffer.dtype) for entry, broken in zip(pair, kinds, strict=True))
        for pair, buffer in zip(entries, cache.keys, strict=True)
    ]
    buffers = list(zip(cache.keys, cache.values, strict=True))
    written = lax.platform_dependent(buffers, new, positions, cpu=write_slices, default=scatter)
    keys, values = zip(*written, strict=True)
    return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))


def scatter(buffers: Any, new: Any, positions: jax.Array) -> Any:
    """Writes a tree of `[B, heads, T, D]` into a tree of `[B, heads, S, D]` at `positions` `[B, T]`."""
    slots = jnp.where(positions < 0, buffers[0][0].shape[2], positions)
    rows = jnp.arange(slots.shape[0])[:, None]
    return jax.tree.map(lambda old, new: old.at[rows, :, slots].set(new.swapaxes(1, 2), mode="drop"), buffers, new)


def write_slices(buffers: Any, new: Any, positions: jax.Array) -> Any:
    """The same row by row, each as one slice read, merged and written back: XLA:CPU's scatter copies whole buffers."""
    batch, window = positions.shape
    capacity = buffers[0][0].shape[2]

    def write_row(row: jax.Array | int, buffers: Any) -> Any:
        mine = positions[row]
        start = jnp.clip(mine[0], 0, capacity - window)
        source = start + jnp.arange(window) - mine[0]
        inside = (source >= 0) & (source < window)
        source = jnp.clip(source, 0, window - 1)
        inside &= mine[source] >= 0
        corner = [jnp.asarray(index, jnp.int32) for index in (row, 0, start, 0)]

        def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
            size = (1, buffer.shape[1], window, buffer.shape[3])
            old = lax.dynamic_slice(buffer, corner, size)
            merged = jnp.where(inside[:, None], new[row][:, source], old[0])
            return lax.dynamic_update_slice(buffer, merged[None], corner)

        return jax.tree.map(write, buffers, new)

    return write_row(0, buffers) if batch == 1 else lax.fori_loop(0, batch, write_row, buffers)
