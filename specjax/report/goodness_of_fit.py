"""Does a sample come from a law, or two samples from one? The G-test, its pooling, and how several tests make one.

Thresholds were fixed before anything was measured with them.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

SIGNIFICANCE = 1e-4
"""P-value below which a check fails."""
MIN_EXPECTED = 10.0
"""Cells that expect fewer samples than this are pooled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTest:
    """A likelihood-ratio test."""

    statistic: float
    """2 sum(seen log(seen / expected)), divided by what small cells add to it on average (`_inflation`)."""
    degrees: int
    """Of freedom: pooled cells less one."""
    p_value: float | None
    """None: one cell is left after pooling, so there is nothing to test."""

    @property
    def passed(self) -> bool | None:
        """Whether the law holds; None: nothing was tested."""
        return None if self.p_value is None else self.p_value >= SIGNIFICANCE


def g_test(counts: Any, probs: Any) -> float:
    """P-value of counts under a law; a check fails below `SIGNIFICANCE`.

    Args:
      counts: how often each cell was seen, any shape.
      probs: the law, same shape. A count where the law is 0 gives the p-value 0.

    Raises:
      ValueError: the shapes differ, the law does not sum to 1, or the sample is too small to say anything.
    """
    counts, probs = np.ravel(counts).astype(np.float64), np.ravel(probs).astype(np.float64)
    if counts.shape != probs.shape or not math.isclose(probs.sum(), 1, abs_tol=1e-6):
        raise ValueError(f"expected a law over {counts.size} cells, got {probs.size} with sum {probs.sum()}")
    if np.count_nonzero(probs) == 1:
        return float(not counts[probs == 0].any())
    p_value = one_sample_test(counts, probs).p_value
    if p_value is None:
        raise ValueError(
            f"expected two cells or more after pooling, got one from {counts.sum():.0f} samples: draw more"
        )
    return p_value


def one_sample_test(counts: np.ndarray, probs: np.ndarray) -> GTest:
    """Do `[C]` counts come from the law `[C]`? A count in a cell of probability 0 gives the p-value 0."""
    possible = probs > 0
    if counts[~possible].any():
        return GTest(statistic=math.inf, degrees=int(possible.sum()), p_value=0.0)
    return _likelihood_ratio(counts[None, possible], counts.sum() * probs[None, possible])


def law_test(tokens: np.ndarray, probs: np.ndarray) -> GTest:
    """Does a sample come from this law? An id of probability 0 (or below 0) in the sample gives the p-value 0.

    Args:
      tokens: `[N]` ids.
      probs: `[V]`.
    """
    outside = np.bincount(tokens.clip(-1) + 1, minlength=len(probs) + 1)  # cell 0: ids below 0
    return one_sample_test(outside, np.append(0, probs / probs.sum(dtype=np.float64)))


def two_sample_test(first: np.ndarray, second: np.ndarray) -> GTest:
    """Do two samples come from one law?

    Args:
      first: `[N, T]` ids, T tokens of each of N rows.
      second: `[M, T]` ids.
    """
    cells, index = np.unique(np.concatenate([first, second]), axis=0, return_inverse=True)
    index = np.split(index.ravel(), [len(first)])
    counts = np.stack([np.bincount(part, minlength=len(cells)) for part in index])
    shares = counts.sum(axis=1, keepdims=True) / counts.sum()
    return _likelihood_ratio(counts, shares * counts.sum(axis=0))


def _likelihood_ratio(counts: np.ndarray, expected: np.ndarray) -> GTest:
    """Of S samples over C cells, `[S, C]` each."""
    counts, expected = _pool(counts, expected)
    seen, degrees = counts > 0, counts.shape[1] - 1
    statistic = max(float(2 * np.sum(counts[seen] * np.log(counts[seen] / expected[seen]))), 0.0)
    if not degrees:
        return GTest(statistic=statistic, degrees=0, p_value=None)
    statistic /= _inflation(expected, degrees)
    return GTest(statistic=statistic, degrees=degrees, p_value=float(chi2.sf(statistic, degrees)))


def _inflation(expected: np.ndarray, degrees: int) -> float:
    """Mean of the statistic over its degrees (Williams 1976, Biometrika 63:33).

    Thousands of cells that expect 10 each add as much as a bias would: 1.7 % of 4,900 is .8 standard deviations.
    """
    total = expected.sum()
    of_samples = (total / expected.sum(axis=1)).sum() - 1 if len(expected) > 1 else 1.0
    of_cells = (total / expected.sum(axis=0)).sum() - 1
    return 1 + float(of_samples * of_cells / (6 * total * degrees))


def _pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds the cells that expect too few into one, with the next smallest where they still do."""
    order = np.argsort(expected.min(axis=0), kind="stable")
    counts, expected = counts[:, order], expected[:, order]
    small = int((expected.min(axis=0) < MIN_EXPECTED).sum())
    if 0 < small < counts.shape[1] and expected[:, :small].sum(axis=1).min() < MIN_EXPECTED:
        small += 1
    starts = np.array([0, *range(max(small, 1), counts.shape[1])])
    return np.add.reduceat(counts, starts, axis=1), np.add.reduceat(expected, starts, axis=1)


def suffices(total: float, probs: np.ndarray) -> bool:
    """Whether `total` samples say anything about a law: two cells are left after pooling, or one is certain."""
    expected = total * probs
    small = expected < MIN_EXPECTED
    cells = int((~small).sum()) + int(expected[small].sum() >= MIN_EXPECTED)
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
    """P-value of `[n]` places being uniform; 0 if a token was forbidden.

    Raises:
      ValueError: too few to say anything.
    """
    return g_test(*_placed(values, cells))


def uniformity_test(values: np.ndarray, cells: int = 16) -> GTest:
    """The same as a test, which may have nothing to say."""
    return one_sample_test(*_placed(values, cells))


def _placed(values: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts `[cells + 1]` and their law; forbidden tokens (NaN) are in the last one, whose probability is 0."""
    places = np.where(np.isnan(values), cells, values * cells)
    return np.bincount(places.astype(int), minlength=cells + 1), np.append(np.full(cells, 1 / cells), 0)
