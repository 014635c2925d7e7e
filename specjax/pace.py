"""When to speculate: each row weighs what its drafts have earned against what a wider target call costs."""

import jax
import jax.numpy as jnp

from specjax.types import Pace

PRIOR = 0.5
"""Acceptance rate a row is credited with before it has any history."""
MEMORY = 8.0
"""Judged tokens over which history fades."""
CURIOSITY = 0.02
"""Share of the way back to the prior that a row takes on each step without a draft, so that it tries again."""


def init_pace(batch_size: int, num_windows: int) -> Pace:
    """A pace that always speculates: every window costs the same."""
    return make_pace(batch_size, jnp.ones(num_windows, jnp.float32))


def make_pace(batch_size: int, costs: jax.Array) -> Pace:
    """A fresh pace.

    Args:
      batch_size: rows B.
      costs: `[W]`, time of a step at each of `DecodeConfig.window_sizes`, in any unit, drafting included.
    """
    return Pace(acceptance=jnp.full((batch_size,), PRIOR, jnp.float32), costs=jnp.asarray(costs, jnp.float32))


def pays(pace: Pace, length: jax.Array, windows: tuple[int, ...]) -> jax.Array:
    """`[B]` bool: whether a draft of `length` `[B]` tokens is expected to beat plain steps.

    Expected tokens of a step are (1 - a^(n + 1)) / (1 - a) at acceptance rate a (arXiv 2211.17192); they are held
    against the cost of the row's own window, so that a row's choice never depends on its neighbours.
    """
    rate = jnp.clip(pace.acceptance, 0.0, 0.99)
    expected = (1 - rate ** (length + 1)) / (1 - rate)
    window = jnp.searchsorted(jnp.asarray(windows), length)
    return expected * pace.costs[0] >= pace.costs[window]


def update_pace(pace: Pace, length: jax.Array, num_accepted: jax.Array) -> Pace:
    """Learns from a verified draft: of `length` `[B]` tokens, `num_accepted` `[B]` passed and at most one failed."""
    judged = jnp.minimum(num_accepted + 1, length)
    observed = num_accepted / jnp.maximum(judged, 1)
    learned = pace.acceptance + (observed - pace.acceptance) * (1 - (1 - 1 / MEMORY) ** judged)
    rested = pace.acceptance + (PRIOR - pace.acceptance) * CURIOSITY
    return pace.replace(acceptance=jnp.where(length > 0, learned, rested))
