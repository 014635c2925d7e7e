"""A plan of `scripts/plan.py` as a picture. Needs matplotlib (the extra `report`)."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from specjax.report.charts import Chart


def plan_chart(plan: Mapping[str, Any]) -> Chart:
    """Modelled speed-up against acceptance, a line for each batch size."""
    settings = plan["settings"]
    return Chart(
        name="plan",
        title=f"Modelled speed-up: {settings['target_name']}, {settings['draft_name']} drafts, {settings['topology']}",
        caption="Modelled from compiled programs, not measured. Solid: the window asked for. Dotted: the best window.",
        draw=lambda axes: _lines(axes, plan),
        height=4.2,
    )


def _lines(axes: Axes, plan: Mapping[str, Any]) -> None:
    window = plan["settings"]["num_speculative_tokens"]
    for index, batch in enumerate(batch for batch in plan["batches"] if batch["modelled"]):
        modelled, color = batch["modelled"], f"C{index % 6}"
        for name, style in (("speedup", "-"), ("best_speedup", ":")):
            gains = modelled[name]
            label = f"batch {batch['batch_size']}" + (f", K={window}" if style == "-" else ", best K")
            axes.plot(list(gains), list(gains.values()), style, color=color, label=label)
    axes.axhline(1, color=axes.xaxis.label.get_color(), linestyle="--", linewidth=1, label="break-even")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chance that a drafted token is accepted")
    axes.set_ylabel("modelled speed-up over plain decoding")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid()
