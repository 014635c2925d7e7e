"""Pictures of a benchmark's summary, in light and in dark. Needs matplotlib (the extra `report`)."""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specjax.report.benchmark import label, measured, varying

Draw = Callable[[Axes], None]
PHASES = ("prefill", "draft", "verify", "other")
SCHEMES = {
    "light": ("#ffffff", "#1f2328", "#d1d9e0", ("#0550ae", "#d9730d", "#1a7f37", "#8250df", "#bf3989", "#6e7781")),
    "dark": ("#0d1117", "#e6edf3", "#3d444d", ("#58a6ff", "#f0a35e", "#56d364", "#c297ff", "#f778ba", "#9198a1")),
}
"""Background, ink, grid and series of each colour scheme; the series differ in lightness as well as in hue."""
_MARKERS = "os^D"
_MOST_LABELS = 14
_INCH = 72


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Of its file."""
    title: str
    caption: str
    """How to read it."""
    draw: Draw
    height: float = 3.6
    """Inches; it is 7 wide."""


def charts(summary: Mapping[str, Any]) -> list[Chart]:
    """The pictures of a summary that `scripts/benchmark.py` made."""
    found = {"run": _run_charts, "sweep": _sweep_charts, "tune": _tune_charts}[summary["command"]](summary)
    rate = summary["synthetic_acceptance"]
    mark = "" if rate is None else f" (simulated acceptance {rate:g})"
    return [dataclasses.replace(chart, title=chart.title + mark) for chart in found]


def render(chart: Chart, scheme: str, file_format: str) -> bytes:
    """A picture as bytes.

    Args:
      chart: what to draw.
      scheme: "light" or "dark".
      file_format: "svg" or "png".
    """
    paper, ink, lines, series = SCHEMES[scheme]
    settings: Any = {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": lines,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=series),
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": lines,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "font.size": 9,
        "svg.hashsalt": "specjax",
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(7, chart.height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title)
        chart.draw(axes)
        file = io.BytesIO()
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(file, format=file_format, dpi=2 * _INCH, metadata=metadata)
    return file.getvalue()


def _run_charts(summary: Mapping[str, Any]) -> list[Chart]:
    overall, groups = summary["overall"], dict(summary["categories"])
    bars = groups | {"all": overall}
    return [
        Chart(
            name="speedup",
            title="Speed-up by category",
            caption="Output tokens per second, prefill included, over those of plain decoding of the same prompts. "
            "Left of the dashed line speculation is slower. Whiskers: 95 % interval of a bootstrap over questions, "
            "where there are 5 of them.",
            draw=lambda axes: _speedup_bars(axes, bars),
            height=1.3 + 0.28 * len(bars),
        ),
        *_drafting_charts(overall["speculative"]),
        Chart(
            name="time",
            title="Where the time goes",
            caption="Milliseconds per output token in a run that waits for the device after each part. Verify holds "
            "the target's call, the verdict and what the drafter learns; other is what the host does in between.",
            draw=lambda axes: _time_split(axes, {"plain": overall["plain"], "speculative": overall["speculative"]}),
            height=2.2,
        ),
        _prediction(groups or bars, "category" if groups else "run"),
    ]


def _drafting_charts(metrics: Mapping[str, Any]) -> list[Chart]:
    return [
        Chart(
            name="acceptance",
            title="Drafted tokens accepted in a step",
            caption="Share of verify steps that accepted exactly so many drafted tokens; steps without a draft "
            "accepted none. The mean of tokens a step, with the one that every step adds, is tau.",
            draw=lambda axes: _histogram(axes, metrics),
        ),
        Chart(
            name="positions",
            title="Acceptance at each position of the window",
            caption="Unconditional: of the steps that drafted this position. Conditional: of the steps that accepted "
            "the position before it (for the first: that drafted it). A position without such steps has no bar.",
            draw=lambda axes: _positions(axes, metrics),
        ),
    ]


def _sweep_charts(summary: Mapping[str, Any]) -> list[Chart]:
    points = measured(summary["points"])
    axes_of = {
        "num_speculative_tokens": ("window", "drafted tokens per step (K)"),
        "batch_size": ("batch", "batch size"),
        "temperature": ("temperature", "temperature"),
    }
    lines = [
        Chart(
            name=name,
            title=f"Output tokens per second against {text}",
            caption="Solid: speculative. Dashed, in the same colour: plain decoding of the same prompts, the "
            "break-even line; below it speculation is slower.",
            draw=lambda axes, axis=axis, text=text: _against(axes, points, axis, text),
            height=4.2,
        )
        for axis, (name, text) in axes_of.items()
        if axis in varying(points)
    ]
    bars = {label(point["values"], varying(points)): point for point in points}
    speedups = Chart(
        name="speedup",
        title="Speed-up of each point",
        caption="Output tokens per second over those of plain decoding. Left of the dashed line speculation is slower.",
        draw=lambda axes: _speedup_bars(axes, bars),
        height=1.3 + 0.28 * len(bars),
    )
    return [*lines, speedups, _prediction(bars, "point")]


def _tune_charts(summary: Mapping[str, Any]) -> list[Chart]:
    candidates = measured(summary["candidates"])
    tried = [one for one in measured(summary["tried"]) if one["speedup"] is not None]
    best = max(tried, key=lambda one: one["speedup"], default=None)
    return [
        Chart(
            name="tune",
            title="Predicted speed-up of each window",
            caption="tau / (mean step / plain step), from acceptance and step times measured apart. Stars are the "
            "measured speed-ups of the best ones, prefill included.",
            draw=lambda axes: _candidates(axes, candidates, tried),
        ),
        *([] if best is None else _drafting_charts(best["speculative"])),
    ]


def _prediction(groups: Mapping[str, Mapping[str, Any]], what: str) -> Chart:
    return Chart(
        name="prediction",
        title="Measured against predicted speed-up of decoding",
        caption=f"One dot a {what}, prefill excluded. Predicted: tau / ((verify + draft) / plain step). On the "
        "diagonal nothing costs time but the steps; batches lie below it, since they wait for their slowest row.",
        draw=lambda axes: _measured_against_predicted(axes, groups),
        height=4.6,
    )


def _speedup_bars(axes: Axes, groups: Mapping[str, Mapping[str, Any]]) -> None:
    rows = {name: group for name, group in groups.items() if group["speedup"] is not None}
    names, values = list(rows), [group["speedup"] for group in rows.values()]
    ends = [group["speedup_interval"] or [group["speedup"]] * 2 for group in rows.values()]
    colors = ["C0" if value >= 1 else "C1" for value in values]
    axes.barh(names, values, color=colors, height=0.62)
    ink = axes.xaxis.label.get_color()
    for index, (value, (low, high)) in enumerate(zip(values, ends, strict=True)):
        axes.plot([low, high], [index, index], color=ink, linewidth=1)
        axes.annotate(f"{value:.2f}", (max(value, high), index), (4, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=ink, linestyle="--", linewidth=1)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max([1.0, *(high for _, high in ends)]))
    axes.set_xlabel("speed-up over plain decoding")
    axes.grid(axis="x")


def _histogram(axes: Axes, metrics: Mapping[str, Any]) -> None:
    counts = metrics["acceptance_histogram"]
    shares = [100 * count / max(sum(counts), 1) for count in counts]
    bars = axes.bar(range(len(counts)), shares, color="C0", width=0.7)
    axes.bar_label(bars, [f"{count:,}" for count in counts], fontsize=8, padding=2)
    axes.set_xlabel("drafted tokens accepted (labels: number of steps)")
    axes.set_ylabel("share of steps")
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.grid(axis="y")


def _positions(axes: Axes, metrics: Mapping[str, Any]) -> None:
    kinds = {
        "unconditional": metrics["acceptance_rate_per_position"],
        "conditional": metrics["conditional_acceptance_rate"],
    }
    for offset, (name, rates) in zip((-0.19, 0.19), kinds.items(), strict=True):
        known = [(index + offset, 100 * rate) for index, rate in enumerate(rates, 1) if rate is not None]
        axes.bar([place for place, _ in known], [rate for _, rate in known], width=0.36, label=name)
    axes.set_xlim(0.5, len(metrics["acceptance_rate_per_position"]) + 0.5)
    axes.set_xlabel("position in the window")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid(axis="y")


def _time_split(axes: Axes, sides: Mapping[str, Mapping[str, Any]]) -> None:
    left = [0.0] * len(sides)
    for phase in PHASES:
        widths = [1e3 * side[f"{phase}_time_s"] / max(side["num_emitted_tokens"], 1) for side in sides.values()]
        axes.barh(list(sides), widths, left=left, height=0.6, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for index, total in enumerate(left):
        axes.annotate(f"{total:.3g} ms", (total, index), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(left))
    axes.set_xlabel("milliseconds per output token")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid(axis="x")


def _against(axes: Axes, points: Sequence[Mapping[str, Any]], axis: str, text: str) -> None:
    others = [name for name in varying(points) if name != axis]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        lines.setdefault(label(point["values"], others) or "speculative", []).append(point)
    for index, (name, line) in enumerate(lines.items()):
        line.sort(key=lambda point: point["values"][axis])
        places = [point["values"][axis] for point in line]
        color, marker = f"C{index % 6}", _MARKERS[index // 6 % len(_MARKERS)]
        for side, style in (("speculative", f"{marker}-"), ("plain", "--")):
            rates = [point[side]["output_tokens_per_second"] for point in line]
            axes.plot(places, rates, style, color=color, markersize=4, label=name if side == "speculative" else None)
    axes.plot([], [], "--", color=axes.xaxis.label.get_color(), label="plain (break-even)")
    if axis != "temperature":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    places = sorted({point["values"][axis] for point in points})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(text)
    axes.set_ylabel("output tokens per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid()


def _measured_against_predicted(axes: Axes, groups: Mapping[str, Mapping[str, Any]]) -> None:
    known = {
        name: (group["predicted_speedup"], group["decode_speedup"])
        for name, group in groups.items()
        if None not in (group["predicted_speedup"], group["decode_speedup"])
    }
    for name, place in known.items():
        axes.plot(*place, "o", color="C0", markersize=5)
        if len(known) <= _MOST_LABELS:
            axes.annotate(name, place, (5, -3), textcoords="offset points", fontsize=7)
    values = [1.0, *(value for place in known.values() for value in place)]
    low, high = 0.9 * min(values), 1.1 * max(values)
    ink = axes.xaxis.label.get_color()
    axes.plot([low, high], [low, high], "-", color="C5", linewidth=1, label="measured = predicted")
    axes.axhline(1, color=ink, linestyle="--", linewidth=1, label="break-even")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured")
    axes.legend(loc="upper left")
    axes.grid()


def _candidates(axes: Axes, candidates: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]) -> None:
    for name in dict.fromkeys(one["values"]["drafter"] for one in candidates):
        line = [one for one in candidates if one["values"]["drafter"] == name]
        windows = [one["values"]["num_speculative_tokens"] for one in line]
        axes.plot(windows, [one["predicted_speedup"] for one in line], "o-", markersize=4, label=f"{name}, predicted")
    windows = [one["values"]["num_speculative_tokens"] for one in tried]
    axes.plot(windows, [one["speedup"] for one in tried], "*", color="C1", markersize=12, label="measured")
    axes.axhline(1, color=axes.xaxis.label.get_color(), linestyle="--", linewidth=1, label="break-even")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafted tokens per step (K)")
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(loc="lower left")
    axes.grid()
