"""Grouped-query attention over a cache that is only read, plus the block of new tokens."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from specjax.cache import read

BLOCK, SMALL_BLOCK = 1024, 256
"""Slots read at once. Small blocks are for a CPU, where they stay in its caches until they are used, and for buffers
that hold no more than a large one."""
MANY = 32
"""Tokens of a row from which on a TPU takes head by head."""
MASKED = jnp.finfo(jnp.float32).min / 2
"""Score of what a query may not see: finite, so that a query that sees nothing yields numbers, not NaN."""

_Sums = tuple[jax.Array, jax.Array, jax.Array]


def attend(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention of T new tokens a row over themselves and over the slots before them.

    Old and new keys meet only in the softmax's maximum and sum (online softmax, arXiv 1805.02867), so that the cache is
    not written, copied or concatenated here. Of its buffers only the blocks that the longest row fills are read; their
    number is traced, so this has no derivative in reverse mode.

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
    size = block_size(cached[0].shape[2])
    small = partial(attend_in_blocks, size=SMALL_BLOCK, window=window)
    large = partial(attend_in_blocks, size=size, window=window)
    tpu = partial(attend_head_by_head, size=size, window=window) if query.shape[1] >= MANY else large
    return lax.platform_dependent(query, new, cached, positions, cpu=small, tpu=tpu, default=large)


def block_size(capacity: int) -> int:
    """Slots that an accelerator reads at once of a buffer of `capacity` slots."""
    return BLOCK if capacity > BLOCK else min(SMALL_BLOCK, capacity)


def attend_in_blocks(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    size: int,
    window: int | None = None,
) -> jax.Array:
    """`attend`, reading `size` slots at a time.

    Reading a prefix of the buffers at once would copy it: a CPU to change its type, a TPU to lay it out anew.
    """
    new, grouped = _quarantine(*new), _group(query, new[0])
    return _ungroup(_mix_blocks(grouped, new, cached, positions, size=size, window=window), query)


def attend_head_by_head(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    size: int,
    window: int | None = None,
) -> jax.Array:
    """`attend_in_blocks`, one row and one KV head at a time.

    The scores of a piece of a prompt, for all rows and heads at once, are too many for a TPU's own memory: XLA would
    write them to HBM and read them back several times.
    """
    new, grouped = _quarantine(*new), _group(query, new[0])
    batch, heads = grouped.shape[:2]

    def mix(part: tuple) -> jax.Array:
        index, query, new, positions = part
        return _mix_blocks(query, new, cached, positions, size=size, window=window, place=divmod(index, heads))

    parts = jax.tree.map(lambda x: x.reshape(-1, 1, 1, *x.shape[2:]), (grouped, new))
    rows = jnp.repeat(positions, heads, axis=0)[:, None]
    mixed = lax.map(mix, (jnp.arange(batch * heads), *parts, rows))
    return _ungroup(mixed.reshape(batch, heads, *mixed.shape[3:]), query)


def _mix_blocks(
    grouped: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    size: int,
    window: int | None,
    place: tuple[jax.Array | int, jax.Array | int] = (0, 0),
) -> jax.Array:
    """Mixtures of values `[B, G, H / G * T, D]`.

    Args:
      grouped: from `_group`; B rows and G heads.
      new: as many.
      cached: whole buffers.
      positions: `[B, T]`.
      size: slots of a block.
      window: as `attend`.
      place: the first row and the first head in the buffers.
    """
    capacity, width = cached[0].shape[2:]
    size = min(size, capacity)

    def read_block(index: jax.Array, carry: _Sums) -> _Sums:
        start = jnp.minimum(index * size, capacity - size)
        slots = start + jnp.arange(size)
        corner = [jnp.asarray(index, jnp.int32) for index in (*place, start, 0)]
        shape = (*grouped.shape[:2], size, width)
        keys, values = (read(lax.dynamic_slice(buffer, corner, shape)) for buffer in cached)
        seen = _visible(positions, slots[None], positions[:, :1], window) & (slots >= index * size)
        return _meet(carry, grouped, keys, values, seen)

    last = jnp.full_like(positions[:, -1:], jnp.iinfo(jnp.int32).max)
    nothing = jnp.zeros((*grouped.shape[:-1], 1), jnp.float32)
    carry = nothing + MASKED, nothing, jnp.zeros(_flat(grouped).shape, jnp.float32)
    carry = _meet(carry, grouped, *new, _visible(positions, positions, last, window))
    start, first = positions[:, 0], 0
    if window is not None:
        first = jnp.maximum(jnp.where(start < 0, last[:, 0], start).min() - window + 1, 0) // size
    num_blocks = -(-jnp.maximum(start.max(), 0) // size)
    _, total, mixed = lax.fori_loop(first, num_blocks, read_block, carry)
    return mixed / _flat(total)


def _meet(sums: _Sums, grouped: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> _Sums:
    """Adds some keys and values to the running maximum, sum and mixture of a softmax."""
    peak, total, mixed = sums
    scores = _scores(grouped, keys, seen)
    highest = jnp.maximum(peak, scores.max(-1, keepdims=True))
    weights, fade = jnp.exp(scores - highest), jnp.exp(peak - highest)
    total = total * fade + weights.sum(-1, keepdims=True)
    return highest, total, mixed * _flat(fade) + _mix(weights, values)


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
