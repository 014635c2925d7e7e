"""What a measurement leaves on disk: `summary.json`, `report.html` and a PNG of each picture."""

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.io.files import write_whole


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
    write_whole(root / "summary.json", text.encode())
    write_whole(root / "report.html", page(summary).encode())
    pictures = charts(summary)
    for chart in pictures:
        write_whole(root / f"{chart.name}.png", render(chart, "light", "png"))
    return [root / name for name in ("summary.json", "report.html", *(f"{chart.name}.png" for chart in pictures))]
