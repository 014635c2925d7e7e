"""When to speculate: what each row's drafts have earned is weighed against what a wider target call costs them all."""

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
      costs: `[W]`, time of a step at each of `DecodeConfig.window_sizes`, in any unit, drafting included; or `[W, 2]`
        with what each token of the longest row's text adds to it.

    Raises:
      ValueError: times that are not numbers above 0, or that fall with longer texts.
    """
    values = np.asarray(costs, np.float32)
    pairs = np.stack([values, np.zeros_like(values)], axis=-1) if values.ndim == 1 else values
    right = pairs.ndim == 2 and pairs.shape[1] == 2 and np.isfinite(pairs).all()
    if not (right and (pairs[:, 0] > 0).all() and (pairs[:, 1] >= 0).all()):
        raise ValueError(f"expected costs [W] or [W, 2], finite, above 0 and not falling, got {values.tolist()}")
    prior = jnp.tile(jnp.asarray(PRIOR, jnp.float32), (batch_size, 1))
    return Pace(acceptance=prior, costs=jnp.asarray(pairs))


def best_window(
    pace: Pace, text_length: jax.Array, length: jax.Array, evidence: jax.Array | None, windows: tuple[int, ...]
) -> jax.Array:
    """The window with which rows together expect most tokens per time, if longer drafts are cut to it: int32 scalar.

    A row's expected tokens are (1 - a^(n + 1)) / (1 - a) at acceptance rate a and n drafted tokens (arXiv 2211.17192);
    a step takes all rows the time of its window over the longest text. Of windows that are equally good it is the
    widest.

    Args:
      pace: costs and histories.
      text_length: `[B]`, tokens of each row's text, 0 for a row that is done.
      length: `[B]`, tokens that each row has drafted, or has room for.
      evidence: `[B]`, of the drafts; None credits them with the best of all grades, so that 0 says that no drafts pay,
        whatever they will look like.
      windows: `DecodeConfig.window_sizes`.
    """
    sizes = jnp.asarray(windows, jnp.int32)
    rate = jnp.where(_counts(evidence), pace.acceptance, 0).max(axis=1, keepdims=True)
    rate = jnp.clip(rate, 0.0, 0.99)
    expected = (1 - rate ** (jnp.minimum(length[:, None], sizes) + 1)) / (1 - rate)
    tokens = jnp.where(text_length[:, None] > 0, expected, 0).sum(axis=0)
    speed = tokens / (pace.costs[:, 0] + pace.costs[:, 1] * text_length.max())
    return sizes[len(windows) - 1 - jnp.argmax(speed[::-1])]


def update_pace(pace: Pace, live: jax.Array, draft: Draft, num_accepted: jax.Array) -> Pace:
    """Learns from a verified draft: of its tokens `num_accepted` `[B]` passed and at most one failed.

    A draft without evidence counts for every grade. A row that drafted nothing forgets a little of every grade; one
    that is not `live` `[B]` stays as it is.
    """
    judged = jnp.minimum(num_accepted + 1, draft.length)[:, None]
    judged = judged.astype(jnp.float32)
    observed = num_accepted[:, None] / jnp.maximum(judged, 1)
    learned = pace.acceptance + (observed - pace.acceptance) * (1 - (1 - 1 / MEMORY) ** judged)
    rested = pace.acceptance + (jnp.asarray(PRIOR, jnp.float32) - pace.acceptance) * CURIOSITY
    moved = jnp.where(_counts(draft.evidence), learned, pace.acceptance)
    moved = jnp.where(draft.length[:, None] > 0, moved, rested)
    return dataclasses.replace(pace, acceptance=jnp.where(live[:, None], moved, pace.acceptance))


def _counts(evidence: jax.Array | None) -> jax.Array:
    """`[B, GRADES]` or `[1, GRADES]` bool: the grades that a draft belongs to."""
    grades = jnp.arange(GRADES)[None]
    return grades >= 0 if evidence is None else grades == jnp.clip(evidence, 0, GRADES - 1)[:, None]
