"""A benchmark's summary in words and tables, for a terminal and for a page."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from specjax.report.table import show

METRICS = (
    "num_prompts",
    "num_prompt_tokens",
    "num_emitted_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "e2e_latency_s",
    "output_tokens_per_second",
    "decode_tokens_per_second",
    "total_token_throughput",
    "prefill_time_s",
    "draft_time_s",
    "verify_time_s",
    "other_time_s",
    "instrumentation_overhead",
    "seconds",
    "compile_time_s",
)
"""What is shown of each way of decoding, in this order."""
_QUOTIENTS = {
    "tau": lambda group: group["speculative"]["mean_acceptance_length"],
    "kept": lambda group: group["speculative"]["draft_acceptance_rate"],
    "plain tok/s": lambda group: group["plain"]["output_tokens_per_second"],
    "spec. tok/s": lambda group: group["speculative"]["output_tokens_per_second"],
    "speed-up": lambda group: group["speedup"],
    "decode only": lambda group: group["decode_speedup"],
    "predicted": lambda group: group["predicted_speedup"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of texts; the first column names its rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(summary: Mapping[str, Any]) -> list[Grid]:
    """The tables of a summary, what was simulated marked in each title."""
    found = {"run": _run_grids, "sweep": _sweep_grids, "tune": _tune_grids}[summary["command"]](summary)
    rate = summary["synthetic_acceptance"]
    mark = "" if rate is None else f" - SIMULATED ACCEPTANCE {rate:g}"
    return [dataclasses.replace(grid, title=grid.title + mark) for grid in found]


def terminal_table(grid: Grid) -> Table:
    """A grid for a terminal."""
    table = Table(title=grid.title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(grid.header):
        table.add_column(name.replace(" ", "\n") if index else name, justify="right" if index else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table


def conclusion(summary: Mapping[str, Any]) -> str:
    """What was found, in a sentence or two."""
    rate = summary["synthetic_acceptance"]
    mark = "" if rate is None else f"Simulated acceptance {rate:g}: times are real, the text and its acceptance not. "
    return mark + {"run": _run_words, "sweep": _sweep_words, "tune": _tune_words}[summary["command"]](summary)


def varying(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the values in which points differ."""
    first = points[0]["values"]
    return [name for name in first if any(point["values"][name] != first[name] for point in points)]


def label(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """A point by some of its values."""
    short = {"num_speculative_tokens": "K={}", "batch_size": "B={}", "temperature": "T={:g}"}
    return ", ".join(short.get(name, "{}").format(values[name]) for name in names)


def _run_grids(summary: Mapping[str, Any]) -> list[Grid]:
    overall, groups = summary["overall"], summary["categories"]
    rows = tuple((name, show(overall["speculative"][name]), show(overall["plain"][name])) for name in METRICS)
    return [
        _comparison("By category", "category", groups | {"all": overall}),
        Grid(title="Both ways of decoding", header=("metric", "speculative", "plain"), rows=rows),
    ]


def _sweep_grids(summary: Mapping[str, Any]) -> list[Grid]:
    points = summary["points"]
    names = varying(points)
    return [_comparison("Points of the sweep", ", ".join(names), {label(one["values"], names): one for one in points})]


def _tune_grids(summary: Mapping[str, Any]) -> list[Grid]:
    columns = {
        "tau": "mean_acceptance_length",
        "plain step s": "plain_step_s",
        "full step s": "spec_step_s",
        "mean step / plain": "step_cost_ratio",
        "predicted": "predicted_speedup",
    }
    names = ("drafter", "num_speculative_tokens")
    rows = tuple(
        (label(one["values"], names), *(show(one[column]) for column in columns.values()))
        for one in summary["candidates"]
    )
    best = summary["measured"]
    return [
        Grid(title="Predicted", header=("drafter, K", *columns), rows=rows),
        _comparison("Measured", "drafter, K", {label(best["values"], names): best}),
    ]


def _comparison(title: str, first: str, groups: Mapping[str, Mapping[str, Any]]) -> Grid:
    rows = tuple(
        (
            name,
            *(_short(take(group)) for take in _QUOTIENTS.values()),
            _interval(group["speedup_interval"], "-"),
            f"{group['num_equal_outputs']}/{group['plain']['num_prompts']}",
        )
        for name, group in groups.items()
    )
    return Grid(title=title, header=(first, *_QUOTIENTS, "95%", "equal"), rows=rows)


def _run_words(summary: Mapping[str, Any]) -> str:
    overall = summary["overall"]
    return (
        f"Speed-up {_factor(overall['speedup'])} over plain decoding ({_interval(overall['speedup_interval'])}), "
        f"prefill included; decoding alone {_factor(overall['decode_speedup'])}, "
        f"predicted {_factor(overall['predicted_speedup'])}. A step drafts for {show(overall['draft_cost_ratio'])} and "
        f"verifies for {show(overall['verify_cost_ratio'])} of a plain step's time."
    )


def _sweep_words(summary: Mapping[str, Any]) -> str:
    points = [point for point in summary["points"] if point["speedup"] is not None]
    names = varying(summary["points"])
    slower = [label(point["values"], names) for point in points if point["speedup"] < 1]
    text = f"Speculation is slower than plain decoding at {len(slower)} of {len(points)} points"
    text += f": {'; '.join(slower)}." if slower else "."
    if not points:
        return text
    best = max(points, key=lambda point: point["speedup"])
    return f"{text} The best is {label(best['values'], names) or 'the only one'} at {_factor(best['speedup'])}."


def _tune_words(summary: Mapping[str, Any]) -> str:
    advice, best = summary["recommendation"], summary["measured"]
    found = f"{_factor(best['speedup'])} ({_interval(best['speedup_interval'])}) measured with "
    found += label(best["values"], ("drafter", "num_speculative_tokens"))
    if advice["speculate"]:
        return f"Use {advice['options']}: {found}."
    return f"Do not speculate ({advice['options']}): {found}, the best prediction, is no gain beyond doubt."


def _short(value: float | None) -> str:
    """Three digits of a number, which is what such a measurement bears."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _interval(ends: Sequence[float] | None, between: str = " to ") -> str:
    return "-" if ends is None else f"{ends[0]:.2f}{between}{ends[1]:.2f}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
