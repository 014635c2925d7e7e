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
_WINDOW = ("drafter", "num_speculative_tokens")
_FULL = 0.9
"""Share of rows with a question below which a report warns."""
_QUOTIENTS = {
    "tau": lambda group: group["speculative"]["mean_acceptance_length"],
    "kept": lambda group: group["speculative"]["draft_acceptance_rate"],
    "plain tok/s": lambda group: group["plain"]["output_tokens_per_second"],
    "spec. tok/s": lambda group: group["speculative"]["output_tokens_per_second"],
    "speed-up": lambda group: group["speedup"],
    "decode only": lambda group: group["decode_speedup"],
    "predicted": lambda group: group["predicted_speedup"],
    "fill": lambda group: group["mean_batch_fill"],
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
    lost = failed(summary)
    if lost:
        rows = tuple((label(one["values"], one["values"]), one["error"]) for one in lost)
        found.append(Grid(title="Failed", header=("point", "error"), rows=rows))
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
    mark = "" if summary["complete"] else "Not complete: this is what had been measured when the report was written. "
    if rate is not None:
        mark += f"Simulated acceptance {rate:g}: times are real, the text and its acceptance not. "
    return mark + {"run": _run_words, "sweep": _sweep_words, "tune": _tune_words}[summary["command"]](summary)


def measured(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of a sweep's or a tuning's points that did not fail."""
    return [point for point in points if "error" not in point]


def failed(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The others, of all of a summary's lists."""
    points = [point for name in ("points", "candidates", "tried") for point in summary.get(name, ())]
    return [point for point in points if "error" in point]


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
    points, names = measured(summary["points"]), varying(summary["points"])
    return [_comparison("Points of the sweep", ", ".join(names), {label(one["values"], names): one for one in points})]


def _tune_grids(summary: Mapping[str, Any]) -> list[Grid]:
    columns = {
        "tau": "mean_acceptance_length",
        "plain step s": "plain_step_s",
        "full step s": "spec_step_s",
        "mean step / plain": "step_cost_ratio",
        "predicted": "predicted_speedup",
    }
    rows = tuple(
        (label(one["values"], _WINDOW), *(show(one[column]) for column in columns.values()))
        for one in measured(summary["candidates"])
    )
    tried = {label(one["values"], _WINDOW): one for one in measured(summary["tried"])}
    predicted = Grid(title="Predicted", header=("drafter, K", *columns), rows=rows)
    return [predicted, *([_comparison("Measured", "drafter, K", tried)] if tried else [])]


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
        f"verifies for {show(overall['verify_cost_ratio'])} of a plain step's time." + _fill_words({"all": overall})
    )


def _sweep_words(summary: Mapping[str, Any]) -> str:
    names = varying(summary["points"])
    points = {
        label(one["values"], names) or "the only one": one
        for one in measured(summary["points"])
        if one["speedup"] is not None
    }
    slower = [name for name, point in points.items() if point["speedup"] < 1]
    text = f"Speculation is slower than plain decoding at {len(slower)} of {len(points)} points"
    text += f": {'; '.join(slower)}." if slower else "."
    if points:
        best = max(points, key=lambda name: points[name]["speedup"])
        text += f" The best is {best} at {_factor(points[best]['speedup'])}."
    lost = [label(one["values"], names) for one in failed(summary)]
    return text + (f" Failed: {'; '.join(lost)}." if lost else "") + _fill_words(points)


def _fill_words(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """A warning of rows that cost time and bring nothing."""
    fills = {name: group["mean_batch_fill"] for name, group in groups.items()}
    low = [f"{name} ({100 * fill:.0f} %)" for name, fill in fills.items() if fill < _FULL]
    return f" Too few questions for the batch: not all rows had one at {'; '.join(low)}." if low else ""


def _tune_words(summary: Mapping[str, Any]) -> str:
    advice, tried = summary["recommendation"], summary["tried"]
    found = [_tried_words(one) for one in tried]
    if advice is None:
        return f"No recommendation yet. Tried: {'; '.join(found) or 'nothing'}."
    if advice["speculate"]:
        before = f" Tried before, without a gain beyond doubt: {'; '.join(found[:-1])}." if found[:-1] else ""
        return f"Use {advice['options']}: {found[-1]}.{before}"
    return (
        f"Do not speculate ({advice['options']}). Of the best predictions none is a gain beyond doubt: "
        f"{'; '.join(found)}."
    )


def _tried_words(point: Mapping[str, Any]) -> str:
    name = label(point["values"], _WINDOW)
    if "error" in point:
        return f"{name} failed"
    return f"{_factor(point['speedup'])} ({_interval(point['speedup_interval'])}) measured with {name}"


def _short(value: float | None) -> str:
    """Three digits of a number, which is what such a measurement bears."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _interval(ends: Sequence[float] | None, between: str = " to ") -> str:
    return "-" if ends is None else f"{ends[0]:.2f}{between}{ends[1]:.2f}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
