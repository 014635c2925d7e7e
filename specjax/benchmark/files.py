"""What a measurement leaves on disk: `summary.json`, `report.html` and a PNG of each picture."""

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_pictures() -> None:
    """Refuses to begin a measurement that could not be drawn.

    Raises:
      ValueError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("expected matplotlib for the report, got none: pip install -e '.[report]'")


def make_directory(directory: str | Path) -> Path:
    """The directory of a report, made and tried before anything is measured for it.

    Raises:
      OSError: it cannot be made, or written to.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        return root


def write_report(summary: Mapping[str, Any], directory: str | Path) -> list[Path]:
    """Writes the report into a directory, which is made; files of an earlier report are replaced, each as a whole.

    The figures come first: drawing takes its time, and may be interrupted.

    Returns:
      The files.
    """
    from specjax.report.charts import charts, render
    from specjax.report.page import page

    root = make_directory(directory)
    text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    return [
        _replace(root / "summary.json", text.encode()),
        _replace(root / "report.html", page(summary).encode()),
        *(_replace(root / f"{chart.name}.png", render(chart, "light", "png")) for chart in charts(summary)),
    ]


def _replace(path: Path, content: bytes) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    return partial.replace(path)
