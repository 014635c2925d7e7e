"""Slots: a batch that never ends. A row that is done gives its place to the next prompt; the others go on."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specjax.types import DecodeState, FinishReason, SamplingParams


@struct.dataclass(kw_only=True)
class Slots:
    """Rows and their parameters. Every array has the rows on its leading axis, but for `Pace.costs`."""

    state: DecodeState
    sampling: SamplingParams


def empty_slots(row: Slots, num_slots: int) -> Slots:
    """`num_slots` copies of a single row, all of them done. No buffer is shared with that row: slots are donated.

    Raises:
      ValueError: a state with an array that is not one row's, such as that of a drafter of the user's own.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(_without_costs(row)) if leaf.shape[:1] != (1,)}
    if shapes:
        raise ValueError(f"expected arrays with one row in front (see Drafter.init), got shapes {sorted(shapes)}")
    slots = _map_rows(partial(jnp.repeat, repeats=num_slots, axis=0), row)
    done = jnp.full((num_slots,), FinishReason.LENGTH.value, jnp.int32)
    pace = dataclasses.replace(slots.state.pace, costs=slots.state.pace.costs.copy())
    return dataclasses.replace(slots, state=dataclasses.replace(slots.state, finish_reason=done, pace=pace))


def insert(slots: Slots, rows: Slots, slot: jax.Array | int, *, pad_id: int) -> Slots:
    """Puts `rows` into as many slots, from `slot` on. All others stay as they are, and so do the costs.

    A row without a prompt is put nowhere: on a mesh each group of devices inserts at once, and most have nothing to.

    Args:
      slots: `[B]` rows.
      rows: `[R]` rows with R <= B, whose buffers may be shorter: what lies behind them in a slot's buffers is then
        left there, where nothing reads it.
      slot: where the first of them goes, at most B - R.
      pad_id: fills the token buffer behind each row's text.
    """
    context = rows.state.context
    missing = slots.state.context.tokens.shape[1] - context.tokens.shape[1]
    tokens = jnp.pad(context.tokens, ((0, 0), (0, missing)), constant_values=pad_id)
    state = dataclasses.replace(rows.state, context=dataclasses.replace(context, tokens=tokens))

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        start = (slot, *[0] * (old.ndim - 1))
        real = (context.prompt_length > 0).reshape(-1, *[1] * (new.ndim - 1))
        return lax.dynamic_update_slice(old, jnp.where(real, new, lax.dynamic_slice(old, start, new.shape)), start)

    return _map_rows(put, slots, dataclasses.replace(rows, state=state))


def _map_rows(function: Callable[..., jax.Array], slots: Slots, *others: Slots) -> Slots:
    """`jax.tree.map` over the arrays that belong to rows; the costs are those of the first."""
    mapped = jax.tree.map(function, *map(_without_costs, (slots, *others)))
    pace = dataclasses.replace(mapped.state.pace, costs=slots.state.pace.costs)
    return dataclasses.replace(mapped, state=dataclasses.replace(mapped.state, pace=pace))


def _without_costs(slots: Slots) -> Slots:
    pace = dataclasses.replace(slots.state.pace, costs=None)
    return dataclasses.replace(slots, state=dataclasses.replace(slots.state, pace=pace))
