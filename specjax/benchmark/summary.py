"""The figures of measured pairs, pooled, and what else has to be known to read them."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax

from specjax.benchmark.measure import Pair
from specjax.benchmark.phases import Phases, total_phases
from specjax.jobs.completion import Batch
from specjax.jobs.summary import compare, summarize
from specjax.report.metrics import Timeline, after_first_arrival, predicted_speedup, ratio, speedup, speedup_interval


def summarize_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Metrics of both ways over the same prompts, and their quotients."""
    fast, slow = [pair.speculative for pair in pairs], [pair.plain for pair in pairs]
    fast_phases = total_phases([pair.speculative_phases for pair in pairs])
    slow_phases = total_phases([pair.plain_phases for pair in pairs])
    speculative, plain = _side(fast, fast_phases), _side(slow, slow_phases)
    seconds = [(pair.speculative.seconds, pair.plain.seconds) for pair in pairs]
    tokens = [(_num_tokens(pair.speculative), _num_tokens(pair.plain)) for pair in pairs]
    differing = compare(fast, slow)
    return {
        "speedup": speedup(speculative, plain),
        "speedup_interval": speedup_interval(tokens, seconds),
        "decode_speedup": ratio(speculative["decode_tokens_per_second"], plain["decode_tokens_per_second"]),
        "predicted_speedup": predicted_speedup(
            speculative["mean_acceptance_length"],
            draft_s=fast_phases.draft_step_s,
            verify_s=fast_phases.verify_step_s,
            plain_s=slow_phases.verify_step_s,
        ),
        "draft_cost_ratio": ratio(fast_phases.draft_step_s, slow_phases.verify_step_s),
        "verify_cost_ratio": ratio(fast_phases.verify_step_s, slow_phases.verify_step_s),
        "num_equal_outputs": differing.num_prompts - len(differing.differences),
        "speculative": speculative,
        "plain": plain,
    }


def by_category(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """`summarize_pairs` of each category, in the order measured."""
    names = dict.fromkeys(pair.category for pair in pairs)
    return {name: summarize_pairs([pair for pair in pairs if pair.category == name]) for name in names}


def batch_records(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One record for each pair: what everything else is pooled from."""
    return [
        {
            "category": pair.category,
            "ids": [completion.prompt.id for completion in pair.plain.completions],
            **{
                name: {"num_emitted_tokens": _num_tokens(batch), "seconds": batch.seconds}
                for name, batch in (("speculative", pair.speculative), ("plain", pair.plain))
            },
        }
        for pair in pairs
    ]


def environment() -> dict[str, Any]:
    """Versions, device and settings that the figures hold for."""
    device = jax.devices()[0]
    packages = ("specjax", "jax", "jaxlib", "flax", "numpy")
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "num_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "matmul_precision": jax.config.values["jax_default_matmul_precision"],
        "prng": jax.config.values["jax_default_prng_impl"],
    }


def _side(batches: Sequence[Batch], phases: Phases) -> dict[str, Any]:
    lines = [[completion.timeline for completion in batch.completions] for batch in batches]
    seconds = sum(batch.seconds for batch in batches)
    timed = phases.prefill_time_s + phases.draft_time_s + phases.verify_time_s + phases.other_time_s
    return summarize(batches) | {
        "itl_s": ratio(phases.step_gaps_s, phases.num_step_gaps),
        "decode_tokens_per_second": _decode_rate(lines),
        "seconds": seconds,
        "prefill_time_s": phases.prefill_time_s,
        "draft_time_s": phases.draft_time_s,
        "verify_time_s": phases.verify_time_s,
        "other_time_s": phases.other_time_s,
        "num_batch_steps": phases.num_batch_steps,
        "instrumentation_overhead": ratio(timed, seconds),
    }


def _decode_rate(batches: Sequence[Sequence[Timeline]]) -> float | None:
    """Tokens per second behind each batch's first step."""
    parts = [after_first_arrival(lines) for lines in batches]
    return ratio(sum(tokens for tokens, _ in parts), sum(seconds for _, seconds in parts))


def _num_tokens(batch: Batch) -> int:
    return sum(len(completion.token_ids) for completion in batch.completions)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return None
