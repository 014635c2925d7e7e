"""Small files from places that are not trusted: bounded size, finite numbers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 26
"""64 MiB: ten times the largest shard index or tokenizer in public use."""


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object.

    Args:
      path: the file.

    Returns:
      The object, every number in it finite.

    Raises:
      ValueError: no such file, not a JSON object, too large, too deep, or with NaN or infinite numbers in it.
    """
    if not path.is_file():
        raise ValueError(f"expected the file {path}, got none")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"expected {path} to hold at most {MAX_JSON_BYTES} bytes, got a larger file")
    try:
        content = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {path} to be JSON with finite numbers, got a damaged file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected {path} to hold a JSON object, got {type(content).__name__}")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text}")
    return value
