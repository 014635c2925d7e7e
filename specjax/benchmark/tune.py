"""What pays on this machine: step costs and acceptance, measured apart, foretell each window's speed-up."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from specjax.benchmark.questions import Question
from specjax.jobs.completion import batch_rows
from specjax.jobs.decoder import Decoder
from specjax.jobs.prompts import Prompt, encode_prompts
from specjax.jobs.warmup import warm_up
from specjax.types import DecodeStats

MARGIN = 1.02
"""Speed-up below which speculation is not worth recommending."""


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


def recommend(values: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Whether to speculate, and how: only what is faster beyond doubt is recommended.

    Args:
      values: drafter and K of the best prediction.
      measured: what `summarize_pairs` says of it.
    """
    factor, interval = measured["speedup"], measured["speedup_interval"]
    low = factor if interval is None else interval[0]
    speculate = factor is not None and factor >= MARGIN and low > 1
    options = f"--drafter {values['drafter']} --num-speculative-tokens {values['num_speculative_tokens']}"
    return {"speculate": speculate, "options": options if speculate else "--drafter none"}
