"""Does a sample come from a law? The G-test, without scipy."""

import math
from typing import Any

import numpy as np


def g_test(counts: Any, probs: Any, pool_below: float = 10.0) -> float:
    """P-value of the likelihood-ratio test; tests fail below 1e-4.

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
    if counts[probs == 0].any():
        return 0.0
    seen, expected = pool(counts, counts.sum() * probs, pool_below)
    if len(seen) == 1 and np.count_nonzero(probs) > 1:
        raise ValueError(
            f"expected two cells or more after pooling, got one from {counts.sum():.0f} samples: draw more"
        )
    informative = seen > 0
    statistic = 2 * np.sum(seen[informative] * np.log(seen[informative] / expected[informative]))
    return chi_square_survival(float(statistic), len(seen) - 1)


def pool(seen: np.ndarray, expected: np.ndarray, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Adds the cells that expect fewer than `below` into one, with the next smallest where they still expect fewer."""
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    small = int(np.sum(expected < below))
    if 0 < small < len(seen) and expected[:small].sum() < below:
        small += 1
    groups = [slice(0, small)] * (small > 0) + [slice(i, i + 1) for i in range(small, len(seen))]
    return np.array([seen[group].sum() for group in groups]), np.array([expected[group].sum() for group in groups])


def chi_square_survival(statistic: float, degrees: int) -> float:
    """P(chi-square with that many degrees of freedom > statistic): the regularised upper incomplete gamma function."""
    shape, x = degrees / 2, max(statistic, 0.0) / 2
    if degrees == 0 or x == 0:
        return 1.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    return 1 - scale * _lower_series(shape, x) if x < shape + 1 else scale * _upper_fraction(shape, x)


def _lower_series(shape: float, x: float) -> float:
    """Sum over n of x^n / (shape (shape + 1) ... (shape + n))."""
    term = total = 1 / shape
    for n in range(1, 10_000):
        term *= x / (shape + n)
        total += term
    return total


def _upper_fraction(shape: float, x: float) -> float:
    """1 / (x + 1 - shape - 1 (1 - shape) / (x + 3 - shape - 2 (2 - shape) / ...)), from the tail inwards."""
    value = 0.0
    for n in range(1_000, 0, -1):
        value = n * (n - shape) / (x + 2 * n + 1 - shape - value)
    return 1 / (x + 1 - shape - value)
