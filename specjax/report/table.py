"""Metrics as tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

SUMMARY_ROWS = (
    "num_prompts",
    "num_prompt_tokens",
    "num_emitted_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "plain_step_s",
    "spec_step_s",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "e2e_latency_s",
    "output_tokens_per_second",
    "total_token_throughput",
    "compile_time_s",
)
"""What a summary shows, in this order."""


def summary_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column for each run, one line for each metric.

    Args:
      runs: metrics by the name of the run.
    """
    table = Table("metric")
    for name in runs:
        table.add_column(name, justify="right")
    for metric in SUMMARY_ROWS:
        table.add_row(metric, *(show(metrics[metric]) for metrics in runs.values()))
    return table


def job_table(summary: Mapping[str, Any]) -> Table:
    """The single numbers of a batch job's summary, one a line, and how its rows ended."""
    table = Table("metric", show_header=False)
    table.add_column(justify="right")
    endings = {f"finish_reason {reason}": count for reason, count in summary["finish_reasons"].items() if count}
    for metric, value in {**summary, **endings}.items():
        if value is None or isinstance(value, int | float):
            table.add_row(metric, show(value))
    return table


def position_table(metrics: Mapping[str, Any]) -> Table:
    """Acceptance at each position of the window, both rates labelled, and how many steps accepted exactly so many.

    Args:
      metrics: what `count_metrics` returns.
    """
    table = Table(
        "drafted\ntoken",
        "accepted, of steps that\ndrafted it (unconditional)",
        "accepted, of steps that accepted\nthe one before (conditional)",
        "steps that accepted\nexactly so many",
    )
    rates = zip(metrics["acceptance_rate_per_position"], metrics["conditional_acceptance_rate"], strict=True)
    lines = [("0", "", ""), *((str(i), show(every), show(given)) for i, (every, given) in enumerate(rates, 1))]
    for line, steps in zip(lines, metrics["acceptance_histogram"], strict=True):
        table.add_row(*line, show(steps))
    return table


def show(value: float | None) -> str:
    """A number, a fraction to four digits; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"
