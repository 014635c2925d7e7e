"""What a job ends with: `completions.jsonl` in the order of the input, and `summary.json`, both from the parts."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.io.files import sync_directory, whole_file, write_whole
from specjax.jobs.batching import SlotBatch
from specjax.jobs.completion import Completion
from specjax.jobs.manifest import NAME
from specjax.jobs.parts import Place, json_line, read_at
from specjax.jobs.runtime import peak_memory
from specjax.report.metrics import count_metrics, no_stats, predicted_speedup, ratio, throughput_metrics
from specjax.types import DecodeStats

COMPLETIONS, SUMMARY, ERRORS = "completions.jsonl", "summary.json", "errors.jsonl"
_MEASURED = ("elapsed_s", "compile_time_s", "host_time_s", "plain_step_s", "spec_step_s")
_MEASURED += ("peak_host_bytes", "peak_device_bytes")
_STATS = tuple(field.name for field in dataclasses.fields(DecodeStats))


def part_record(completion: Completion, num_truncated_tokens: int) -> dict[str, Any]:
    """What a part holds of a completed row whose prompt has lost so many tokens."""
    return {
        "id": completion.prompt.id,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt.token_ids),
        "num_truncated_tokens": num_truncated_tokens,
        "stats": {name: np.asarray(getattr(completion.stats, name)).tolist() for name in _STATS},
    }


def measured_so_far(slots: SlotBatch, elapsed_s: float) -> dict[str, float | None]:
    """What a part holds, in each record, of its start's measurements: a kill may come at any row, so the last counts.

    Args:
      slots: what decodes.
      elapsed_s: seconds of decoding up to now, compiling left out.
    """
    plain, widest = (None, None) if slots.step_times_s is None else slots.step_times_s
    return {
        "elapsed_s": round(elapsed_s, 6),
        "compile_time_s": round(slots.compile_time_s, 6),
        "host_time_s": round(slots.host_time_s, 6),
        "plain_step_s": plain,
        "spec_step_s": widest,
        **peak_memory(),
    }


def completion_record(record: Mapping[str, Any], *, paced: bool) -> dict[str, Any]:
    """The line of `completions.jsonl` for a record of a part: what does not depend on when and how it was computed.

    Args:
      record: of the part.
      paced: whether rows speculate by measured step times. How often they do then hangs on the machine, so the line
        holds no counters of it; they stay in the part and in the summary.
    """
    kept = {name: record[name] for name in ("id", "text", "token_ids", "finish_reason")}
    lengths = {name: record[name] for name in ("num_prompt_tokens", "num_truncated_tokens")}
    counts = {"num_emitted_tokens": len(record["token_ids"])} if paced else count_metrics(_stats(record))
    return kept | {"metrics": lengths | counts}


def write_results(
    directory: Path, places: Sequence[Place], errors: Sequence[Mapping[str, Any]], *, paced: bool
) -> dict[str, Any]:
    """Writes the files that a job ends with; `completions.jsonl` comes last, since it says that the job is done.

    Args:
      directory: of the job.
      places: of the rows' records, in the order of the input.
      errors: lines that were skipped; `errors.jsonl` is there if there are any.
      paced: see `completion_record`.

    Returns:
      The summary.
    """
    for name in (COMPLETIONS, SUMMARY, ERRORS, NAME):
        for abandoned in directory.glob(f".{name}-*"):  # by a crash in the middle of what follows
            abandoned.unlink()
    if errors:
        write_whole(directory / ERRORS, b"".join(map(json_line, errors)))
    else:
        (directory / ERRORS).unlink(missing_ok=True)
    totals = _Totals()
    with whole_file(directory / COMPLETIONS) as file:
        for record in read_at(places):
            totals.add(record)
            file.write(json_line(completion_record(record, paced=paced)))
        summary = totals.metrics() | {"num_errors": len(errors)}
        write_whole(directory / SUMMARY, json.dumps(summary, indent=2).encode() + b"\n")
    return summary


def withdraw(directory: Path) -> None:
    """Takes away what says that the job is done, for as long as rows are missing."""
    for name in (COMPLETIONS, SUMMARY):
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)


class _Totals:
    """Counters of all rows, and what each start of each process had measured at its last row."""

    def __init__(self) -> None:
        self._rows = self._prompt = self._truncated = 0
        self._stats: DecodeStats | None = None
        self._starts: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._reasons = dict.fromkeys(("stop", "length", "nan"), 0)

    def add(self, record: Mapping[str, Any]) -> None:
        stats = _stats(record)
        self._rows += 1
        self._prompt += record["num_prompt_tokens"]
        self._truncated += record["num_truncated_tokens"] > 0
        self._reasons[record["finish_reason"]] += 1
        self._stats = stats if self._stats is None else _sum(self._stats, stats)
        start = record["process"], record["run"]
        last = self._starts.get(start)
        if last is None or record["elapsed_s"] >= last["elapsed_s"]:
            self._starts[start] = {name: record[name] for name in _MEASURED}

    def metrics(self) -> dict[str, Any]:
        counts = count_metrics(no_stats(0) if self._stats is None else self._stats)
        seconds: dict[int, float] = {}
        for (process, _), times in self._starts.items():
            seconds[process] = seconds.get(process, 0.0) + times["elapsed_s"]
        longest = max(seconds.values(), default=0.0)
        return {
            "num_prompts": self._rows,
            "num_truncated_prompts": self._truncated,
            "finish_reasons": self._reasons,
            "num_prompt_tokens": self._prompt,
            **counts,
            "num_processes": len(seconds),
            "num_runs": len(self._starts),
            "decoding_time_s": longest,
            **throughput_metrics(self._prompt, counts["num_emitted_tokens"], longest),
            **self._measured(sum(seconds.values()), counts["mean_acceptance_length"]),
        }

    def _measured(self, seconds: float, acceptance_length: float | None) -> dict[str, float | None]:
        """What starts have measured: sums, means of step times, most memory; and the speed-up that steps would give.

        It takes rows to draft in the same steps, as a pace lets them. Where one drafts alone, all pay for its window.
        """
        found = {
            name: [times[name] for times in self._starts.values() if times[name] is not None] for name in _MEASURED
        }
        host = sum(found["host_time_s"])
        plain, widest = (ratio(sum(found[name]), len(found[name])) for name in ("plain_step_s", "spec_step_s"))
        stats = no_stats(1) if self._stats is None else self._stats
        share = ratio(int(stats.drafted_per_position[:1].sum()), int(stats.steps)) or 0.0
        step = None if plain is None or widest is None else plain + share * (widest - plain)
        return {
            "compile_time_s": sum(found["compile_time_s"]),
            "host_time_s": host,
            "host_share": ratio(host, seconds),
            "plain_step_s": plain,
            "spec_step_s": widest,
            "predicted_speedup": predicted_speedup(acceptance_length, draft_s=0.0, verify_s=step, plain_s=plain),
            "peak_host_bytes": max(found["peak_host_bytes"], default=None),
            "peak_device_bytes": max(found["peak_device_bytes"], default=None),
        }


def _stats(record: Mapping[str, Any]) -> DecodeStats:
    counters: dict[str, Any] = {name: np.asarray(record["stats"][name], np.int64) for name in _STATS}
    return DecodeStats(**counters)


def _sum(one: DecodeStats, other: DecodeStats) -> DecodeStats:
    return DecodeStats(**{name: getattr(one, name) + getattr(other, name) for name in _STATS})
