"""Rows dealt to the devices that a vocabulary is cut over: each decides for its share, and all learn what it did.

Logits travel as a matrix, rows by columns: a window's few positions as a dimension of their own would be laid out on a
TPU with many times their size in padding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import ModelOutput


def by_rows(function: Callable[..., Any], output: ModelOutput, *rows: Any) -> Any:
    """`function(logits, *rows)`; where the logits are cut over a mesh axis each device calls it for its share of rows.

    Devices exchange parts of the vocabulary for rows, so that each receives 1 / n of the logits and has 1 / n of the
    work, on whole rows and by the same code as a single device. A batch that does not divide is filled up.

    Args:
      function: works row by row, on logits `[R, T, W]` (W with what the vocabulary was padded by) and on trees of
        arrays `[R, ...]`, and returns such a tree.
      output: a model's, of B rows.
      rows: trees of arrays `[B, ...]`, the same on all devices.

    Returns:
      The results of all B rows, the same on all devices.
    """
    axis, logits = output.axis, output.logits
    if axis is None:
        return function(logits, *rows)
    (batch, length, width), size = logits.shape, lax.axis_size(axis)
    share = -(-batch // size)
    filled = jnp.pad(logits, ((0, share * size - batch), (0, 0), (0, 0))).reshape(size, share * length, width)
    mine = jnp.minimum(lax.axis_index(axis) * share + jnp.arange(share), batch - 1)
    whole = lax.all_to_all(filled, axis, split_axis=0, concat_axis=1)
    results = function(whole.reshape(share, length, size * width), *jax.tree.map(lambda leaf: leaf[mine], rows))
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, axis, tiled=True)[:batch], results)


def all_columns(output: ModelOutput) -> jax.Array:
    """The whole logits `[B, T, W]` of a model's output on every device."""
    if output.axis is None:
        return output.logits
    rows = output.logits.reshape(-1, output.logits.shape[-1])
    return lax.all_gather(rows, output.axis, axis=1).reshape(*output.logits.shape[:-1], -1)
