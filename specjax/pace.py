"""When to speculate: each row weighs what its drafts have earned against what a wider target call costs."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft, Pace

PRIOR = (0.3, 0.55, 0.7, 0.8)
"""Acceptance rate that a row credits each grade of evidence with before it has any history."""
GRADES = len(PRIOR)
MEMORY = 8.0
"""Judged tokens over which history fades."""
CURIOSITY = 0.02
"""Share of the way back to the prior that a row takes on each step without a draft, so that it tries again."""


def init_pace(batch_size: int, num_windows: int) -> Pace:
    """A pace that always speculates: every window costs the same."""
    return make_pace(batch_size, np.ones(num_windows))


def make_pace(batch_size: int, costs: Sequence[float] | np.ndarray | jax.Array) -> Pace:
    """A fresh pace.

    Args:
      batch_size: rows B.
      costs: `[W]`, time of a step at each of `DecodeConfig.window_sizes`, in any unit, drafting included.

    Raises:
      ValueError: costs that are not numbers above 0.
    """
    values = np.asarray(costs, np.float32)
    if values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"expected costs [W], finite and above 0, got {values.tolist()}")
    prior = jnp.tile(jnp.asarray(PRIOR, jnp.float32), (batch_size, 1))
    return Pace(acceptance=prior, costs=jnp.asarray(costs, jnp.float32))


def pays(pace: Pace, length: jax.Array, evidence: jax.Array | None, windows: tuple[int, ...]) -> jax.Array:
    """`[B]` bool: whether drafts of that `length` `[B]` and `evidence` `[B]` are expected to beat plain steps.

    Expected tokens of a step are (1 - a^(n + 1)) / (1 - a) at acceptance rate a and n drafted tokens (arXiv
    2211.17192); they are held against the cost of the row's own window, so that a row's choice depends on its own
    prefix and history and never on its neighbours. Without evidence a draft is credited with the best of all grades:
    False then says that no draft pays, whatever it will look like.
    """
    rate = jnp.where(_counts(evidence), pace.acceptance, 0).max(axis=1)
    rate = jnp.clip(rate, 0.0, 0.99)
    expected = (1 - rate ** (length + 1)) / (1 - rate)
    window = jnp.searchsorted(jnp.asarray(windows), length)
    return expected * pace.costs[0] >= pace.costs[window]


def update_pace(pace: Pace, live: jax.Array, draft: Draft, num_accepted: jax.Array) -> Pace:
    """Learns from a verified draft: of its tokens `num_accepted` `[B]` passed and at most one failed.

    A draft without evidence counts for every grade. A row that drafted nothing forgets a little of every grade; one
    that is not `live` `[B]` stays as it is.
    """
    judged = jnp.minimum(num_accepted + 1, draft.length)[:, None]
    observed = num_accepted[:, None] / jnp.maximum(judged, 1)
    learned = pace.acceptance + (observed - pace.acceptance) * (1 - (1 - 1 / MEMORY) ** judged)
    rested = pace.acceptance + (jnp.asarray(PRIOR) - pace.acceptance) * CURIOSITY
    moved = jnp.where(_counts(draft.evidence), learned, pace.acceptance)
    moved = jnp.where(draft.length[:, None] > 0, moved, rested)
    return dataclasses.replace(pace, acceptance=jnp.where(live[:, None], moved, pace.acceptance))


def _counts(evidence: jax.Array | None) -> jax.Array:
    """`[B, GRADES]` or `[1, GRADES]` bool: the grades that a draft belongs to."""
    grades = jnp.arange(GRADES)[None]
    return grades >= 0 if evidence is None else grades == jnp.clip(evidence, 0, GRADES - 1)[:, None]
