"""Does a sample come from a law? The G-test, its pooling, and how several tests make one."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

SIGNIFICANCE = 1e-4
"""P-value below which a check fails. Fixed before anything was measured."""


def g_test(counts: Any, probs: Any, pool_below: float = 10.0) -> float:
    """P-value of the likelihood-ratio test; a check fails below `SIGNIFICANCE`.

    Args:
      counts: how often each cell was seen, any shape.
      probs: the law, same shape. A count where the law is 0 gives the p-value 0.
      pool_below: cells that expect fewer are pooled.

    Raises:
      ValueError: the shapes differ, the law does not sum to 1, or the sample is too small to say anything.
    """
    counts, probs = np.ravel(counts).astype(np.float64), np.ravel(probs).astype(np.float64)
    if counts.shape != probs.shape or not math.isclose(probs.sum(), 1, abs_tol=1e-6):
        raise ValueError(f"expected a law over {counts.size} cells, got {probs.size} with sum {probs.sum()}")
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    seen, expected = pool(counts[possible], counts.sum() * probs[possible], pool_below)
    if len(seen) == 1 and possible.sum() > 1:
        raise ValueError(
            f"expected two cells or more after pooling, got one from {counts.sum():.0f} samples: draw more"
        )
    informative = seen > 0
    statistic = 2 * np.sum(seen[informative] * np.log(seen[informative] / expected[informative]))
    return float(chi2.sf(max(statistic, 0.0), len(seen) - 1)) if len(seen) > 1 else 1.0


def pool(seen: np.ndarray, expected: np.ndarray, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Adds the cells that expect fewer than `below` into one, with the next smallest where they still expect fewer."""
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    small = int(np.sum(expected < below))
    if 0 < small < len(seen) and expected[:small].sum() < below:
        small += 1
    starts = np.array([0, *range(max(small, 1), len(seen))])
    return np.add.reduceat(seen, starts), np.add.reduceat(expected, starts)


def suffices(total: float, probs: np.ndarray, pool_below: float = 10.0) -> bool:
    """Whether `total` samples say anything about a law: two cells are left after pooling, or one is certain."""
    expected = total * probs
    small = expected < pool_below
    cells = int((~small).sum()) + int(expected[small].sum() >= pool_below)
    return cells > 1 or np.count_nonzero(probs) == 1


def combined(p_values: Iterable[float]) -> float:
    """One p-value from those of several tests, however they depend on one another (Bonferroni)."""
    values = list(p_values)
    return min(1.0, min(values) * len(values))


def places(draws: jax.Array, tokens: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Where each token falls in its law: uniform in [0, 1), whatever came before, if that law is right.

    So tokens of different laws make one sample (the probability integral transform, spread over each token's mass).

    Args:
      draws: `[...]` uniform numbers in [0, 1).
      tokens: `[...]` ids.
      log_probs: `[..., V]`, the law of each.

    Returns:
      `[...]`, the mass of the likelier tokens (lower ids first among equals) and of a part `draws` of the token's own;
      NaN for a token that its law forbids.
    """
    own = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)
    earlier = jnp.arange(log_probs.shape[-1]) < tokens[..., None]
    before = jnp.where((log_probs > own) | ((log_probs == own) & earlier), jnp.exp(log_probs), 0).sum(axis=-1)
    mass = before + draws * jnp.exp(own[..., 0])
    return jnp.where(own[..., 0] > -jnp.inf, jnp.clip(mass, 0, 1 - 1e-7), jnp.nan)


def uniformity(values: np.ndarray, cells: int = 16) -> float:
    """P-value of `[n]` places being uniform; 0 if a token was forbidden."""
    if np.isnan(values).any():
        return 0.0
    return g_test(np.bincount((values * cells).astype(int), minlength=cells), np.full(cells, 1 / cells))
