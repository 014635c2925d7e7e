"""Architectures by name: facts of the public `config.json` files, without their weights; or of a local one."""

import json
from pathlib import Path

from specjax.models.config import TransformerConfig, from_huggingface

_PUBLIC = Path(__file__).parent / "models.json"


def public_models() -> list[str]:
    """Names that `find_config` knows."""
    return sorted(json.loads(_PUBLIC.read_text()))


def find_config(name: str) -> TransformerConfig:
    """The architecture of a public model, or of a `config.json` (or a directory with one).

    Raises:
      ValueError: neither, or an architecture that is not implemented.
    """
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"expected a config.json in {name}, got none")
        try:
            return from_huggingface(json.loads(file.read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"expected JSON in {file}, got {error}") from error
    public = json.loads(_PUBLIC.read_text())
    if name.lower() not in public:
        raise ValueError(f"expected a path to a config.json or one of {', '.join(public)}, got {name!r}")
    return from_huggingface(public[name.lower()])
