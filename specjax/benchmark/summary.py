"""The figures of measured pairs, pooled, and what else has to be known to read them."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
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
    differing = compare(fast, slow)
    return {
        "speedup": speedup(speculative, plain),
        "speedup_interval": _interval(pairs),
        "decode_speedup": ratio(speculative["decode_tokens_per_second"], plain["decode_tokens_per_second"]),
        "predicted_speedup": predicted_speedup(
            speculative["mean_acceptance_length"],
            draft_s=fast_phases.draft_step_s,
            verify_s=fast_phases.verify_step_s,
            plain_s=slow_phases.verify_step_s,
        ),
        "draft_cost_ratio": ratio(fast_phases.draft_step_s, slow_phases.verify_step_s),
        "verify_cost_ratio": ratio(fast_phases.verify_step_s, slow_phases.verify_step_s),
        "mean_batch_fill": ratio(sum(len(one.questions) for one in pairs), sum(one.batch_size for one in pairs)),
        "num_equal_outputs": differing.num_prompts - len(differing.differences),
        "speculative": speculative,
        "plain": plain,
    }


def by_category(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """`summarize_pairs` of each category, in the order measured; none for batches of several rows, which share time."""
    if any(pair.batch_size > 1 for pair in pairs):
        return {}
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.questions[0].category, []).append(pair)
    return {name: summarize_pairs(group) for name, group in groups.items()}


def batch_records(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One record for each pair: what everything else is pooled from."""
    return [
        {
            "categories": [question.category for question in pair.questions],
            "ids": [completion.prompt.id for completion in pair.plain.completions],
            **{
                name: {"num_emitted_tokens": _num_tokens(batch), "seconds": batch.seconds}
                for name, batch in (("speculative", pair.speculative), ("plain", pair.plain))
            },
        }
        for pair in pairs
    ]


def environment() -> dict[str, Any]:
    """When, on what and with which versions and settings it was measured; of a checkout also the commit."""
    device, root = jax.devices()[0], Path(__file__).parents[2]
    describe = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    packages = ("specjax", "jax", "jaxlib", "flax", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output(*describe) if (root / ".git").exists() else None,
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "num_cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "cpu": _cpu(),
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


def _interval(pairs: Sequence[Pair]) -> tuple[float, float] | None:
    """`speedup_interval` over questions, all turns of one together; over batches where questions share them."""
    groups: dict[Any, list[Pair]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(index if pair.batch_size > 1 else pair.questions[0].id, []).append(pair)
    sides = [[(one.speculative, one.plain) for one in group] for group in groups.values()]
    tokens = [tuple(sum(map(_num_tokens, side)) for side in zip(*group, strict=True)) for group in sides]
    seconds = [tuple(sum(batch.seconds for batch in side) for side in zip(*group, strict=True)) for group in sides]
    return speedup_interval(tokens, seconds)


def _num_tokens(batch: Batch) -> int:
    return sum(len(completion.token_ids) for completion in batch.completions)


def _cpu() -> str | None:
    """The model of the host's processor, as the system names it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return named or _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None


def _output(*command: str) -> str | None:
    """What a command prints, None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return None
