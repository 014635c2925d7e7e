"""Rows dealt to the devices of a mesh axis: each decides for its share, and all learn what it did.

Logits travel as a matrix, rows by columns: a window's few positions as a dimension of their own would be laid out on a
TPU with many times their size in padding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specjax.types import ModelOutput


@struct.dataclass
class Share:
    """A tree of arrays `[R, ...]` of this device's rows, which no other device has."""

    rows: Any


def by_rows(function: Callable[..., Any], output: ModelOutput, *rows: Any, axis: str | None = None) -> Any:
    """`function(logits, *rows)`, of which on a mesh each device computes its share of the rows.

    Where the vocabulary is cut, devices exchange its parts for rows: each receives 1 / n of the logits and has 1 / n of
    the work, on whole rows and by the same code as a single device. A batch that does not divide is filled up.

    Args:
      function: works row by row, on logits `[R, T, V]` and on trees of arrays `[R, ...]`, and returns such a tree.
        What it returns in a `Share` stays on the device.
      output: a model's, of B rows.
      rows: trees of arrays `[B, ...]`, the same on all devices, or of `Share`.
      axis: deals the rows of a model that is not cut.

    Returns:
      The results of all B rows, the same on all devices.
    """
    axis = output.axis or axis
    if axis is None:
        return function(output.logits, *rows)
    batch = len(output.logits)
    share = -(-batch // lax.axis_size(axis))
    mine = jnp.minimum(lax.axis_index(axis) * share + jnp.arange(share), batch - 1)
    logits = output.logits[mine] if output.axis is None else _whole_rows(output, output.axis, share)
    results = function(logits, *_map(lambda share: share.rows, lambda leaf: leaf[mine], rows))
    return _map(lambda share: share, lambda leaf: lax.all_gather(leaf, axis, tiled=True)[:batch], results)


def _whole_rows(output: ModelOutput, axis: str, share: int) -> jax.Array:
    """Logits `[share, T, V]` of this device's rows, for which it gives away its columns of all others."""
    (batch, length, width), size = output.logits.shape, lax.axis_size(axis)
    filled = jnp.pad(output.logits, ((0, share * size - batch), (0, 0), (0, 0)))
    parts = lax.all_to_all(filled.reshape(size, share * length, width), axis, split_axis=0, concat_axis=1)
    return parts.reshape(share, length, size * width)[..., : output.vocab_size]


def _map(share: Callable[[Share], Any], leaf: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """`jax.tree.map` with a function of its own for each `Share`."""

    def is_share(node: Any) -> bool:
        return isinstance(node, Share)

    return jax.tree.map(lambda node: share(node) if is_share(node) else leaf(node), tree, is_leaf=is_share)
