"""Summaries as `scripts/benchmark.py` writes them, of figures that are known."""

from typing import Any

import pytest
from matplotlib.figure import Figure
from measured import pair_of

from specjax.benchmark.summary import by_category, summarize_pairs
from specjax.benchmark.tune import predict, recommend
from specjax.report import charts, page
from specjax.report.charts import Chart

SURROUNDINGS = {
    "complete": True,
    "lossless": True,
    "synthetic_acceptance": None,
    "settings": {"model": "<tiny>"},
    "num_questions": 2,
    "environment": {"device": "cpu"},
    "peak_host_bytes": 2**30,
    "peak_device_bytes": None,
}


def run_summary() -> dict[str, Any]:
    """Two categories of one batch each: 9 seconds each plainly; 5 and 9 speculatively."""
    pairs = [pair_of("qa"), pair_of("math", fast=9.0, name="y")]
    overall = summarize_pairs(pairs) | {"speedup_interval": (0.9, 1.8)}
    return {"command": "run", **SURROUNDINGS, "overall": overall, "categories": by_category(pairs), "batches": []}


def values_of(window: int, size: int) -> dict[str, Any]:
    """The values of a point."""
    return {
        "drafter": "ngram",
        "num_speculative_tokens": window,
        "verifier": "rejection",
        "temperature": 0.0,
        "batch_size": size,
    }


def sweep_summary() -> dict[str, Any]:
    """K 1 and 4, batch 1 and 2: 5, 10, 6 and 12 seconds against 9."""
    times = {(1, 1): 5.0, (4, 1): 10.0, (1, 2): 6.0, (4, 2): 12.0}
    points = [{"values": values_of(*at), **summarize_pairs([pair_of(fast=fast)])} for at, fast in times.items()]
    return {"command": "sweep", **SURROUNDINGS, "points": points}


def tune_summary(*, speedup: float = 1.8) -> dict[str, Any]:
    """K 1 and 4, the latter predicted at 1.82 and measured at `speedup`."""
    stats = pair_of().speculative.completions[0].stats
    costs = {1: (1.0, 2.0), 4: (1.0, 1.7)}
    candidates = [
        {
            "values": values_of(window, 1),
            **predict(stats, window, plain_step_s=plain, spec_step_s=wide, batch_size=1),
        }
        for window, (plain, wide) in costs.items()
    ]
    tried = {"values": values_of(4, 1), **summarize_pairs([pair_of(fast=9 / speedup, name=str(n)) for n in range(5)])}
    return {
        "command": "tune",
        **SURROUNDINGS,
        "candidates": candidates,
        "tried": [tried],
        "recommendation": recommend("--drafter ngram --num-speculative-tokens 4", tried),
    }


def draw_without_pixels(patch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn onto their axes and come out empty: making files of them is most of what a report costs."""

    def render(chart: Chart, scheme: str, file_format: str) -> bytes:
        chart.draw(Figure().subplots())
        return b""

    patch.setattr(charts, "render", render)
    patch.setattr(page, "render", render)
