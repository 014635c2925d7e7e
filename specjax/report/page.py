"""A benchmark's summary as one page that needs nothing beside itself."""

import base64
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from specjax.report.benchmark import Grid, conclusion, grids
from specjax.report.charts import Chart, charts, render

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --line: #d1d9e0; --soft: #59636e; --warn: #9a3412; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --line: #3d444d; --soft: #9198a1; --warn: #f0a35e; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.warning { border-left: 4px solid var(--warn); color: var(--warn); font-weight: 600; padding-left: .8rem; }
figure { margin: 2rem 0; } figure img { max-width: 100%; width: 50rem; }
figcaption { color: var(--soft); font-size: .9rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { border: 1px solid var(--line); font-size: .8rem; overflow-x: auto; padding: .8rem; }
"""


def page(summary: Mapping[str, Any]) -> str:
    """The report: what was found, pictures, tables, and what the figures hold for."""
    title = f"specjax benchmark: {summary['command']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _warning(summary["synthetic_acceptance"]),
        f"<p>{escape(conclusion(summary))}</p>",
        *map(_figure, charts(summary)),
        *map(_table, grids(summary)),
        "<h2>Settings</h2>",
        _preformatted({name: summary[name] for name in ("settings", "num_questions")}),
        "<h2>Machine</h2>",
        _preformatted({name: summary[name] for name in ("environment", "peak_host_bytes", "peak_device_bytes")}),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def _warning(rate: float | None) -> str:
    if rate is None:
        return ""
    text = f"Simulated acceptance {rate:g}. A coin, not the target, decided what was kept: not lossless."
    return f'<p class="warning">{text}</p>'


def _figure(chart: Chart) -> str:
    light, dark = (_embedded(render(chart, scheme, "svg")) for scheme in ("light", "dark"))
    pictures = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}"><img alt="{chart.title}" src="{light}">'
    return f"<figure><picture>{pictures}</picture><figcaption>{escape(chart.caption)}</figcaption></figure>"


def _embedded(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in grid.header)
    rows = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in grid.rows]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<h2>{escape(grid.title)}</h2><div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _preformatted(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"
