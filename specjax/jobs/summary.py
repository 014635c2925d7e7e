"""What is told about a run: a record for each completion, a summary, a comparison with plain decoding."""

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from specjax.jobs.completion import Batch, Completion
from specjax.jobs.settings import Settings
from specjax.report.metrics import count_metrics, latency_metrics, pool, ratio, speedup, throughput_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A speculative run beside a plain one over the same prompts."""

    speedup: float | None
    num_prompts: int
    differences: tuple[tuple[str | int, int], ...]
    """Id and index of the first token that differs, for each prompt whose tokens do."""


def completion_row(completion: Completion) -> dict[str, Any]:
    """The JSONL row of a completion."""
    content, log_probs = completion.prompt.content, completion.log_probs
    row = {
        "id": completion.prompt.id,
        "prompt": content if isinstance(content, str) else list(content),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if log_probs is not None:
        row["logprobs"] = {"raw": log_probs.raw.tolist(), "processed": log_probs.processed.tolist()}
    return row | {"metrics": completion_metrics(completion)}


def completion_metrics(completion: Completion) -> dict[str, Any]:
    """The metrics of one completion; its throughput is over its own end-to-end latency."""
    latencies = latency_metrics([completion.timeline], stepwise=completion.stepwise)
    prompt, output = len(completion.prompt.token_ids), len(completion.token_ids)
    counts = {"num_prompt_tokens": prompt, **count_metrics(completion.stats)}
    return counts | latencies | throughput_metrics(prompt, output, latencies["e2e_latency_s"] or 0)


def summarize(batches: Sequence[Batch]) -> dict[str, Any]:
    """The metrics of a run."""
    completions = [completion for batch in batches for completion in batch.completions]
    counts = count_metrics(pool([completion.stats for completion in completions]))
    prompt = sum(len(completion.prompt.token_ids) for completion in completions)
    stepwise = all(completion.stepwise for completion in completions)
    measured = [batch.step_times_s for batch in batches if batch.step_times_s is not None]
    return {
        "num_prompts": len(completions),
        "num_prompt_tokens": prompt,
        **counts,
        **latency_metrics([completion.timeline for completion in completions], stepwise=stepwise),
        **throughput_metrics(prompt, counts["num_emitted_tokens"], sum(batch.seconds for batch in batches)),
        "plain_step_s": _mean([times[0] for times in measured]),
        "spec_step_s": _mean([times[1] for times in measured]),
        "compile_time_s": sum(batch.compile_time_s for batch in batches),
    }


def compare(run: Sequence[Batch], plain: Sequence[Batch]) -> Comparison:
    """Holds a run against plain decoding of the same prompts."""
    rows = [[completion for batch in batches for completion in batch.completions] for batches in (run, plain)]
    pairs = list(zip(*rows, strict=True))
    firsts = ((one.prompt.id, _first_difference(one.token_ids, other.token_ids)) for one, other in pairs)
    return Comparison(
        speedup=speedup(summarize(run), summarize(plain)),
        num_prompts=len(pairs),
        differences=tuple((name, index) for name, index in firsts if index is not None),
    )


def comparison_text(comparison: Comparison, settings: Settings) -> str:
    """A comparison in two sentences: the speed-up, and what equal or different tokens mean under these settings."""
    different, total = len(comparison.differences), comparison.num_prompts
    found = f"equal for {total} of {total} prompts"
    if different:
        name, index = comparison.differences[0]
        found = f"different for {different} of {total} prompts, first for id {name!r} at output token {index}"
    if not settings.promises_equal_tokens:
        found += " (only their law is the same under this verifier; exact_match promises equal tokens)"
    elif different:
        found += " (a window sums in another order than a single token: rounding decides near ties, mostly in bfloat16)"
    factor = "-" if comparison.speedup is None else f"{comparison.speedup:.3g}x"
    return f"speedup: {factor} over plain decoding\ntokens: {found}"


def _mean(values: Sequence[float]) -> float | None:
    return ratio(sum(values), len(values))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((index for index, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
