"""Where two runs part, and whether rounding explains it: pure functions of scores and logits.

Every threshold here was fixed before anything was measured with it.
"""

import dataclasses
import math

import numpy as np

FLOAT32_GAP = 1e-4
"""Logits closer than this are a tie in float32."""
BFLOAT16_STEPS = 2
"""Logits within so many steps from one bfloat16 number to the next are a tie in bfloat16."""
SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8}


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


def at_edge(scores: Scores, token: int, dtype: str) -> bool:
    """Whether rounding decides if the filters keep a token."""
    gap = filter_edge(scores, token) * scores.temperature
    return gap < rounding(dtype, float(np.abs(scores.logits[token])))


def finite(value: float) -> float | None:
    """A number for JSON: None for what is not finite."""
    return float(value) if math.isfinite(value) else None
