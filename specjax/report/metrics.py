"""The numbers of a run, under the names of the literature: pure functions of counters and of arrival times.

Counts are pooled before anything is divided, and a quotient with nothing below it is None. Compilation is in no time
here: whoever measures keeps it apart.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.types import DecodeStats

FEWEST = 5
"""Questions below which resampling them says nothing: of two it gives the smaller and the larger, at any level."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """When the tokens of one prompt arrived, in seconds of any one clock."""

    start: float
    """When the prompt was taken up."""
    emissions: tuple[tuple[float, int], ...]
    """Time and number of tokens (at least 1) of each arrival, in order."""


def pool(stats: Sequence[DecodeStats]) -> DecodeStats:
    """Sums the counters of rows (arrays without the B axis) that share one window."""
    return jax.tree.map(lambda *rows: np.sum(rows, axis=0), *stats or [no_stats(0)])


def no_stats(num_tokens: int) -> DecodeStats:
    """The counters of a row that has not begun."""
    zero: Any = np.zeros((), np.int64)
    window: Any = np.zeros(num_tokens, np.int64)
    histogram: Any = np.zeros(num_tokens + 1, np.int64)
    return DecodeStats(
        steps=zero,
        drafted=zero,
        accepted=zero,
        emitted=zero,
        drafted_per_position=window,
        accepted_per_position=window,
        histogram=histogram,
    )


def cut_stats(history: Sequence[DecodeStats], num_tokens: int) -> DecodeStats:
    """The counters of a row whose output was cut to `num_tokens`: what was cut off counts nowhere.

    Args:
      history: the row's counters before the first step and after each, in order.
      num_tokens: output tokens that were kept, at most those emitted in the end.
    """
    step = next(index for index, stats in enumerate(history) if stats.emitted >= num_tokens)
    if step == 0:
        return history[0]
    before, after = history[step - 1], history[step]
    kept = num_tokens - before.emitted
    accepted = np.minimum(after.accepted - before.accepted, kept)
    return dataclasses.replace(
        after,
        emitted=before.emitted + kept,
        accepted=before.accepted + accepted,
        accepted_per_position=before.accepted_per_position + (np.arange(len(after.accepted_per_position)) < accepted),
        histogram=before.histogram + (np.arange(len(after.histogram)) == accepted),
    )


def cut_timeline(timeline: Timeline, num_tokens: int) -> Timeline:
    """The arrivals of the first `num_tokens` tokens."""
    kept = []
    for time, count in timeline.emissions:
        if num_tokens > 0:
            kept.append((time, min(count, num_tokens)))
        num_tokens -= count
    return dataclasses.replace(timeline, emissions=tuple(kept))


def count_metrics(stats: DecodeStats) -> dict[str, Any]:
    """What the counters of a row, or of rows pooled, say about drafting."""
    steps, drafted, accepted, emitted = map(int, (stats.steps, stats.drafted, stats.accepted, stats.emitted))
    drafted_at, accepted_at = stats.drafted_per_position.tolist(), stats.accepted_per_position.tolist()
    return {
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": emitted,
        "mean_acceptance_length": ratio(emitted, steps),
        "draft_acceptance_rate": ratio(accepted, drafted),
        "acceptance_rate_per_position": list(map(ratio, accepted_at, drafted_at)),
        "conditional_acceptance_rate": list(map(ratio, accepted_at, drafted_at[:1] + accepted_at)),
        "acceptance_histogram": stats.histogram.tolist(),
    }


def latency_metrics(timelines: Sequence[Timeline], *, stepwise: bool) -> dict[str, float | None]:
    """How long readers waited: `ttft_s` and `e2e_latency_s` are means over prompts, the others are pooled.

    Args:
      timelines: one for each prompt; prompts without any output are left out.
      stepwise: whether each emission is one step of the decoder, without which there is no `itl_s`.

    Returns:
      `ttft_s`, start to first token; `tpot_s`, time per token after the first; `itl_s`, time from one step's tokens to
      the next's; `e2e_latency_s`, start to last token.
    """
    served = [(line.start, line.emissions) for line in timelines if line.emissions]
    spans = [emissions[-1][0] - emissions[0][0] for _, emissions in served]
    tokens = sum(count for _, emissions in served for _, count in emissions)
    gaps = sum(len(emissions) - 1 for _, emissions in served)
    return {
        "ttft_s": ratio(sum(emissions[0][0] - start for start, emissions in served), len(served)),
        "tpot_s": ratio(sum(spans), tokens - len(served)),
        "itl_s": ratio(sum(spans), gaps) if stepwise else None,
        "e2e_latency_s": ratio(sum(emissions[-1][0] - start for start, emissions in served), len(served)),
    }


def throughput_metrics(num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> dict[str, float | None]:
    """`output_tokens_per_second` and `total_token_throughput` (prompt and output) of work that took `seconds`."""
    return {
        "output_tokens_per_second": ratio(num_output_tokens, seconds),
        "total_token_throughput": ratio(num_prompt_tokens + num_output_tokens, seconds),
    }


def speedup(metrics: Mapping[str, Any], plain: Mapping[str, Any]) -> float | None:
    """Output tokens per second of a run over those of plain decoding in the same process, dtype and prompts."""
    return ratio(metrics["output_tokens_per_second"], plain["output_tokens_per_second"])


def predicted_speedup(
    acceptance_length: float | None, *, draft_s: float | None, verify_s: float | None, plain_s: float | None
) -> float | None:
    """What a speed-up would be if steps cost what they cost and nothing else did: tau / ((verify + draft) / plain).

    Args:
      acceptance_length: tau, tokens emitted per step.
      draft_s: drafting time of a step.
      verify_s: verification time of a step.
      plain_s: time of a plain step.

    References:
      arXiv 2211.17192, theorem 3.8.
    """
    if draft_s is None or verify_s is None or acceptance_length is None:
        return None
    cost = ratio(draft_s + verify_s, plain_s)
    return ratio(acceptance_length, cost)


def after_first_arrival(timelines: Sequence[Timeline]) -> tuple[int, float]:
    """Tokens and seconds of a batch behind its first step: its pace without the prefill."""
    served = [line.emissions for line in timelines if line.emissions]
    if not served:
        return 0, 0.0
    tokens = sum(count for emissions in served for _, count in emissions[1:])
    first = min(emissions[0][0] for emissions in served)
    return tokens, max(emissions[-1][0] for emissions in served) - first


def speedup_interval(
    tokens: Sequence[tuple[int, ...]], seconds: Sequence[tuple[float, ...]], *, num_draws: int = 1000
) -> tuple[float, float] | None:
    """Where 95 of 100 speed-ups lie that other questions of this kind would have shown: a bootstrap.

    Args:
      tokens: output tokens of each question (or of whatever else was measured by itself), speculative and plain.
      seconds: their times.
      num_draws: resampled sets of questions, drawn with a fixed seed.

    Returns:
      The interval's ends, or None for fewer than `FEWEST` questions, or one without output.
    """
    if len(tokens) < FEWEST or not all(min(pair) > 0 for pair in tokens):
        return None
    chosen = np.random.default_rng(0).integers(len(tokens), size=(num_draws, len(tokens)))
    rates = np.asarray(tokens, float)[chosen].sum(axis=1) / np.asarray(seconds)[chosen].sum(axis=1)
    low, high = np.quantile(rates[:, 0] / rates[:, 1], [0.025, 0.975])
    return float(low), float(high)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where there is nothing to divide by or no value at all."""
    return numerator / denominator if denominator and numerator is not None else None
