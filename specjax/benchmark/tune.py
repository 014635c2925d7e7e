"""What pays on this machine: step costs and acceptance, measured apart, foretell each window's speed-up."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.benchmark.measure import num_batches
from specjax.benchmark.questions import Question
from specjax.jobs.completion import batch_rows
from specjax.jobs.decoder import Decoder
from specjax.jobs.prompts import Prompt, encode_prompts
from specjax.jobs.warmup import warm_up
from specjax.report.metrics import FEWEST
from specjax.types import DecodeStats

MARGIN = 1.02
"""Speed-up below which speculation is not worth recommending."""
MOST_TRIED = 3
"""Predictions that are measured until one holds."""


def step_costs(
    decoder: Decoder,
    question: Question,
    *,
    batch_size: int,
    raw_prompt: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Seconds of a plain step, and of one that drafts and verifies a full window, drafting included.

    Args:
      decoder: what is to be timed.
      question: its first turn sets the width of the buffers.
      batch_size: rows.
      raw_prompt: the turn is encoded as it is, without a chat template.
      clock: seconds.
    """
    prompt = Prompt(id=question.id, content=question.turns[0])
    rows = batch_rows(decoder, encode_prompts(decoder.tokenizer, [prompt], raw=raw_prompt), batch_size)
    sampling = decoder.sampling.rows(batch_size, decoder.eos_ids)
    times = warm_up(dataclasses.replace(decoder, measured_pace=True), rows, sampling, clock).step_times_s
    if times is None:
        raise ValueError("expected a decoder with a drafter to time, got none")
    return times


def predict(
    stats: DecodeStats, num_tokens: int, *, plain_step_s: float, spec_step_s: float, batch_size: int
) -> dict[str, Any]:
    """What a window of `num_tokens` would bring, from the counters of a run with at least as wide a one.

    A step emits one token and those of the first `num_tokens` drafted that were accepted; it costs a wide call if any
    row of its batch drafted, and a plain one otherwise. Rows are taken to draft independently of each other.

    Args:
      stats: pooled counters of a run that drafted whenever it could.
      num_tokens: K.
      plain_step_s: time of a plain step.
      spec_step_s: time of a step with a full window, drafting included.
      batch_size: rows.

    Returns:
      `mean_acceptance_length`, `step_cost_ratio` (mean step over plain step), `predicted_speedup`, and both times.
    """
    length = 1 + float(stats.accepted_per_position[:num_tokens].sum() / stats.steps)
    drafting = 1 - (1 - float(stats.drafted_per_position[0] / stats.steps)) ** batch_size
    cost = 1 - drafting + drafting * spec_step_s / plain_step_s
    return {
        "mean_acceptance_length": length,
        "step_cost_ratio": cost,
        "predicted_speedup": length / cost,
        "plain_step_s": plain_step_s,
        "spec_step_s": spec_step_s,
    }


def worth_trying(candidates: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the candidates to measure, the best prediction first: those that would pay, or else the best alone.

    Args:
      candidates: what `predict` says of each, or an `error`.
    """
    known = [index for index, one in enumerate(candidates) if "error" not in one]
    order = sorted(known, key=lambda index: -candidates[index]["predicted_speedup"])
    paying = [index for index in order if candidates[index]["predicted_speedup"] >= MARGIN]
    return paying[:MOST_TRIED] or order[:1]


def check_enough(questions: Sequence[Question], batch_size: int) -> None:
    """Refuses questions that would bear no verdict.

    Raises:
      ValueError: too few of them, or too few batches where several share one.
    """
    units, count = ("questions", len(questions)) if batch_size == 1 else ("batches", num_batches(questions, batch_size))
    if count < FEWEST:
        raise ValueError(
            f"expected at least {FEWEST} {units} to tell a gain from chance, got {count}: give more --questions or a "
            "lower --batch-size"
        )


def recommend(options: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Whether to speculate, and how: only what is faster beyond doubt is recommended.

    Args:
      options: those of the drafter that was measured.
      measured: what `summarize_pairs` says of it, or an `error`.
    """
    factor, interval = measured.get("speedup"), measured.get("speedup_interval")
    speculate = factor is not None and factor >= MARGIN and interval is not None and interval[0] > 1
    return {"speculate": speculate, "options": options if speculate else "--drafter none"}
