"""Counters of a decoding run, carried on the device."""

import jax
import jax.numpy as jnp

from specjax.types import DecodeStats


def init_stats(batch_size: int, num_tokens: int) -> DecodeStats:
    """Zeroed counters for `batch_size` rows and windows of `num_tokens`."""

    def zeros(*shape: int) -> jax.Array:  # a buffer each: the state that holds them is donated
        return jnp.zeros((batch_size, *shape), jnp.int32)

    return DecodeStats(
        steps=zeros(),
        drafted=zeros(),
        accepted=zeros(),
        emitted=zeros(),
        drafted_per_position=zeros(num_tokens),
        accepted_per_position=zeros(num_tokens),
        histogram=zeros(num_tokens + 1),
    )


def count_step(
    stats: DecodeStats, live: jax.Array, drafted: jax.Array, accepted: jax.Array, emitted: jax.Array
) -> DecodeStats:
    """Adds one step of each live row.

    Args:
      stats: counters so far.
      live: `[B]` bool.
      drafted: `[B]` int32, proposed tokens.
      accepted: `[B]` int32, accepted tokens that the output kept.
      emitted: `[B]` int32, tokens added to the output.
    """
    once = live.astype(jnp.int32)
    positions = jnp.arange(stats.drafted_per_position.shape[1])
    bins = jnp.arange(stats.histogram.shape[1])
    return DecodeStats(
        steps=stats.steps + once,
        drafted=stats.drafted + once * drafted,
        accepted=stats.accepted + once * accepted,
        emitted=stats.emitted + once * emitted,
        drafted_per_position=stats.drafted_per_position + once[:, None] * (positions < drafted[:, None]),
        accepted_per_position=stats.accepted_per_position + once[:, None] * (positions < accepted[:, None]),
        histogram=stats.histogram + once[:, None] * (bins == accepted[:, None]),
    )
