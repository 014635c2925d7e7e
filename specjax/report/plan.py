"""A plan of `scripts/plan.py` as tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specjax.report.table import show

_GIB = 2**30


def plan_tables(plan: Mapping[str, Any]) -> list[Table]:
    """What the compiler made, what it moves, and what is modelled from it."""
    return [_memory(plan), _steps(plan), _gains(plan)]


def _memory(plan: Mapping[str, Any]) -> Table:
    table = Table("batch", "program", "fits", title=f"Compiled for {plan['settings']['topology']}: GiB of HBM a device")
    for name in ("arguments", "temporaries", "aliased", "total", "estimated"):
        table.add_column(name, justify="right")
    for batch in plan["batches"]:
        for name, figures in batch["programs"].items():
            sizes = figures.get("memory", {})
            total = sizes.get("total", figures.get("used"))
            shown = [sizes.get(key) for key in ("arguments", "temporaries", "aliased")] + [total]
            excess = figures.get("excess")
            fits = "yes" if figures["fits"] else f"no, by {excess / _GIB:.2f}" if excess else "does not compile"
            estimate = batch["estimated_bytes"] if name == "speculative" else None
            table.add_row(str(batch["batch_size"]), name, fits, *map(_gib, [*shown, estimate]))
    return table


def _steps(plan: Mapping[str, Any]) -> Table:
    """One line for each part of a step: what moves, beside the least."""
    table = Table("batch", "part", title="A step on one device: compiled, beside the modelled least")
    for name in ("MB moved", "least", "ratio", "GFLOP (least)", "collectives", "MB exchanged", "to the host"):
        table.add_column(name, justify="right")
    for batch in plan["batches"]:
        for label, figures, least, host in _parts(batch):
            moved, few = figures["bytes"] / 1e6, least["bytes"] / 1e6
            exchanged = sum(one["bytes"] for one in figures["collectives"].values()) / 1e6
            kinds = ", ".join(f"{show(round(one['count']))} {kind}" for kind, one in figures["collectives"].items())
            ratio, flops = f"{moved / few:.3f}", f"{least['flops'] / 1e9:.3g}"
            numbers = show(moved), show(few), ratio, flops, kinds or "0", show(exchanged)
            table.add_row(str(batch["batch_size"]), label, *numbers, host)
    return table


def _parts(batch: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any], str]]:
    """The name of each part, its figures, its least and its loop's calls of the host, where the program fits."""
    programs, least = batch["programs"], batch["least"]
    parts = [
        ("prompt chunk", "prefill", "step", "prefill"),
        ("plain", "plain", "step", "plain"),
        ("speculative", "speculative", "step", "step"),
        ("of it verify", "speculative", "verify", "verify"),
    ]
    known = [(programs[name], *part) for part in parts if (name := part[1]) in programs and programs[name]["fits"]]
    return [
        (label, one[key], least[few], show(one["host_transfers"]) if key == "step" else "")
        for one, label, _, key, few in known
    ]


def _gains(plan: Mapping[str, Any]) -> Table:
    """Speed-ups of each batch size that fits; below them where they end, by the largest of these."""
    window, fitting = plan["settings"]["num_speculative_tokens"], [one for one in plan["batches"] if one["modelled"]]
    table = Table(title="Modelled, not measured: speed-up by acceptance (best K)")
    rates = fitting[-1]["modelled"]["speedup"] if fitting else ()
    for name in ("batch", "plain ms", f"K={window} ms", *(f"{rate:g}" for rate in rates)):
        table.add_column(name, justify="right")
    for batch in plan["batches"]:
        modelled = batch["modelled"]
        if modelled is None:
            table.add_row(str(batch["batch_size"]), "does not", "fit")
            continue
        gains = [f"{gain:.2f} ({modelled['best_window'][rate]})" for rate, gain in modelled["speedup"].items()]
        times = (f"{1e3 * modelled[name]:.3g}" for name in ("plain_step_s", "spec_step_s"))
        table.add_row(str(batch["batch_size"]), *times, *gains)
    if not fitting:
        return table
    largest = max(fitting, key=lambda batch: batch["batch_size"])
    last = largest["modelled"]
    searched, ends = last["searched_rows_per_device"], last["break_even_rows_per_device"].values()
    shown = (f"> {searched:,}" if rows is None else show(rows) for rows in ends)
    table.add_row("stops paying at", "rows a", "device", *shown)
    most = largest["estimated_most_rows_per_device"]
    estimate = "no rows are estimated to fit" if most is None else f"{most:,} rows a device are estimated to fit"
    table.caption = (
        f"{estimate}; looked for up to {searched:,}, with what batch {largest['batch_size']} took over the least"
    )
    return table


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / _GIB:.2f}"
