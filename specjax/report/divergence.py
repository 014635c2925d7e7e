"""Where two runs part, and whether rounding explains it: pure functions of counts, scores and logits.

Every threshold here was fixed before anything was measured with it.
"""

import dataclasses
import math

import numpy as np
from scipy.stats import chi2

SIGNIFICANCE = 1e-4
"""P-value below which a test of the law fails."""
MIN_EXPECTED = 10.0
"""Cells that expect fewer rows than this are pooled."""
FLOAT32_GAP = 1e-4
"""Logits closer than this are a tie in float32."""
BFLOAT16_STEPS = 2
"""Logits within so many steps from one bfloat16 number to the next are a tie in bfloat16."""
SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTest:
    """A likelihood-ratio test."""

    statistic: float
    degrees: int
    """Of freedom: pooled cells less one."""
    p_value: float | None
    """None: one cell is left after pooling, so there is nothing to test."""

    @property
    def passed(self) -> bool | None:
        """Whether the law holds; None: nothing was tested."""
        return None if self.p_value is None else self.p_value >= SIGNIFICANCE


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
    return _g_test(counts, shares * counts.sum(axis=0))


def law_test(tokens: np.ndarray, probs: np.ndarray) -> GTest:
    """Does a sample come from this law? An id of probability 0 (or below 0) in the sample gives the p-value 0.

    Args:
      tokens: `[N]` ids.
      probs: `[V]`.
    """
    law = probs / probs.sum(dtype=np.float64)
    if (tokens < 0).any() or (law[tokens] == 0).any():
        return GTest(statistic=math.inf, degrees=int((law > 0).sum()), p_value=0.0)
    counts = np.bincount(tokens, minlength=len(law))[None]
    return _g_test(counts[:, law > 0], (len(tokens) * law[None])[:, law > 0])


def _g_test(counts: np.ndarray, expected: np.ndarray) -> GTest:
    """Of S samples over C cells, `[S, C]` each."""
    counts, expected = _pool(counts, expected)
    seen, degrees = counts > 0, counts.shape[1] - 1
    statistic = max(float(2 * np.sum(counts[seen] * np.log(counts[seen] / expected[seen]))), 0.0)
    return GTest(statistic=statistic, degrees=degrees, p_value=float(chi2.sf(statistic, degrees)) if degrees else None)


def _pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds the cells that expect too few into one, with the next smallest where they still do."""
    order = np.argsort(expected.min(axis=0), kind="stable")
    counts, expected = counts[:, order], expected[:, order]
    small = int((expected.min(axis=0) < MIN_EXPECTED).sum())
    if 0 < small < counts.shape[1] and expected[:, :small].sum(axis=1).min() < MIN_EXPECTED:
        small += 1
    starts = np.array([0, *range(max(small, 1), counts.shape[1])])
    return np.add.reduceat(counts, starts, axis=1), np.add.reduceat(expected, starts, axis=1)


def rounding(dtype: str, magnitude: float) -> float:
    """How close two logits must be for rounding to decide between them.

    Args:
      dtype: of the weights, "float32" or "bfloat16".
      magnitude: size of the logits.
    """
    return FLOAT32_GAP if dtype == "float32" else BFLOAT16_STEPS * step(dtype, magnitude)


def step(dtype: str, magnitude: float) -> float:
    """Distance from a number of this size to the next larger one of the dtype."""
    return 2.0 ** (math.frexp(max(magnitude, 2.0**-126))[1] - SIGNIFICANT_BITS[dtype])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What plain decoding compared at one place, `[V]` each."""

    logits: np.ndarray
    """As the model gave them."""
    log_probs: np.ndarray
    """After bias, penalties and temperature, before any filter."""
    noise: np.ndarray
    """Gumbel noise; zeros for a greedy row."""
    kept: np.ndarray
    """bool: passed the filters."""
    temperature: float
    """1 for a greedy row."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where a prompt's speculative text parts from its plain text. Gaps are in units of logits."""

    prompt_id: str | int
    index: int
    """Of the output token, from 0."""
    plain_id: int | None
    """None: the text had ended."""
    other_id: int | None
    plain_text: str = ""
    other_text: str = ""
    gap: float | None = None
    """Between the scores of the two tokens in plain decoding: log-probabilities, with their noise where rows are
    sampled. None where it was not computed, because equal tokens were not promised or one text had ended."""
    top2_gap: float | None = None
    """Between the two best scores: less than `gap` if a third token lies between."""
    edge: float | None = None
    """Distance of the nearer of the two tokens from where top-k, top-p or min-p cuts; None: no filters."""
    allowed: float = 0.0
    """What rounding explains, at the size of these logits."""

    @property
    def within_rounding(self) -> bool:
        """Whether rounding explains it: the two scores tie, or a filter keeps one of the tokens by a hair."""
        return any(gap is not None and gap < self.allowed for gap in (self.gap, self.edge))


def explain(divergence: Divergence, scores: Scores, dtype: str) -> Divergence:
    """The divergence with its gaps, from what plain decoding compared there."""
    plain, other = divergence.plain_id, divergence.other_id
    if plain is None or other is None:
        return divergence
    total = scores.log_probs + scores.noise
    best = np.sort(np.where(scores.kept, total, -np.inf))[-2:]
    edge = min(filter_edge(scores, plain), filter_edge(scores, other))
    magnitude = float(np.abs(scores.logits[[plain, other]]).max())
    return dataclasses.replace(
        divergence,
        gap=finite(abs(total[plain] - total[other]) * scores.temperature),
        top2_gap=finite((best[1] - best[0]) * scores.temperature),
        edge=finite(edge * scores.temperature),
        allowed=rounding(dtype, magnitude),
    )


def filter_edge(scores: Scores, token: int) -> float:
    """How far a token's log-probability lies from where top-k, top-p or min-p cuts; inf without filters.

    A change of every log-probability by at most d moves the mass m of the heavier tokens by at most 2 d m (1 - m), so
    the distance to top-p counts in m (1 - m), as a gap between two log-probabilities counts twice the change of each.
    """
    log_probs, distances = scores.log_probs, [math.inf]
    own, ordered = log_probs[token], np.sort(log_probs)[::-1].astype(np.float64)
    if own == -np.inf:
        return math.inf
    heavier = int((log_probs > own).sum())
    if 0 < scores.top_k < len(ordered):
        ordered, rival = ordered[: scores.top_k], ordered[scores.top_k - (heavier >= scores.top_k)]
        distances.append(abs(own - rival))
    if scores.top_p < 1:
        mass = float(np.exp(ordered[:heavier]).sum() / np.exp(ordered).sum())
        slack = mass * (1 - mass)
        distances.append(abs(mass - scores.top_p) / slack if slack > 0 else math.inf)
    if scores.min_p > 0:
        distances.append(abs(own - ordered[0] - math.log(scores.min_p)))
    return float(min(distances))


def finite(value: float) -> float | None:
    """A number for JSON: None for what is not finite."""
    return float(value) if math.isfinite(value) else None
