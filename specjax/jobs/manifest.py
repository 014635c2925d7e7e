"""What a job's output was made with: settings and models that may not change until it is whole, and where it ran."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.io.files import read_json
from specjax.io.sources import resolve_model
from specjax.jobs.parts import PATTERN, write_whole
from specjax.jobs.settings import DraftModel, Settings, record
from specjax.parallel.launch import check_same
from specjax.verify import ExactMatch

NAME = "manifest.json"
FREE = frozenset(
    {"model", "prompt", "prompts", "batch_size", "output", "compare", "stream", "per_position", "compilation_cache"}
    | {"parallel"}
)
"""Settings that may change between two starts: no token depends on them (a model's name does not make it the same)."""
_PINNED = ("format", "settings", "model", "draft_model")


def build_manifest(settings: Settings, *, samples: bool) -> dict[str, Any]:
    """The manifest of a job with these settings, on this machine.

    Args:
      settings: of the job.
      samples: whether any row has a temperature above 0.

    Raises:
      ValueError: a model that cannot be found.
    """
    device = jax.devices()[0]
    same_tokens = settings.dtype == "float32" and (not samples or isinstance(settings.verifier, ExactMatch))
    return {
        "format": 1,
        "settings": _pinned(settings),
        **_models(settings),
        "lossless_level": "tokens" if same_tokens else "distribution",
        "model_name": settings.model,
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
        "prng_implementation": str(jax.random.key_impl(jax.random.key(0))),
        "mesh": {
            "platform": device.platform,
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            **settings.parallel.sizes(),
        },
        "versions": {"python": platform.python_version(), **_versions("specjax", "jax", "jaxlib")},
    }


def check_manifest(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Holds a manifest against the one in a directory, which it becomes if there is none.

    Returns:
      What differs without being refused, such as a version of a library: tokens may then differ by rounding.

    Raises:
      ValueError: a setting or a model that is not the one which the output was begun with; the message names it.
    """
    path = directory / NAME
    if not path.exists() and any(part.stat().st_size for part in directory.glob(PATTERN)):
        raise ValueError(
            f"expected {path} beside the completed rows, got none: without it nothing says what they were made with. "
            "Put it back, or choose another --output-dir"
        )
    if not path.exists():
        text = json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n"
        write_whole(path, [text], replace=False)  # another process may have begun at the same time, otherwise
    before, now = dict(_leaves(read_json(path))), dict(_leaves(json.loads(json.dumps(manifest))))
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    for name in changed:
        if name.split(".")[0] in _PINNED:
            raise ValueError(
                f"expected {name.removeprefix('settings.')} = {before.get(name)!r}, with which this output was begun "
                f"({path}), got {now.get(name)!r}: go on with that, or choose another --output-dir"
            )
    return [f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed]


def check_processes(settings: Settings) -> None:
    """Makes sure that all processes of one run have the same settings and models, before any of them loads a model.

    Raises:
      ValueError: on every process: they would mix the weights of two models, or wait for each other.
    """
    if jax.process_count() == 1:
        return
    fields = {name: value for name, value in record(settings).items() if name not in FREE - {"batch_size", "compare"}}
    fields["drafter"] = {name: value for name, value in fields["drafter"].items() if name != "model"}
    placed = settings.parallel.driver, settings.parallel.sizes()
    check_same("settings", (fields, placed, settings.streams))
    check_same("models", _models(settings))


def _models(settings: Settings) -> dict[str, Any]:
    """What the models are, whatever they are called."""
    draft = settings.drafter.model if isinstance(settings.drafter, DraftModel) else None
    names = {"model": settings.model, "draft_model": draft}
    return {kind: name and {"sha256": digest_files(resolve_model(name))} for kind, name in names.items()}


def digest_files(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of a directory's files; hidden ones do not count."""
    if path.is_file():
        return _digest(path)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    return hashlib.sha256(json.dumps([(name, _digest(path / name)) for name in shown]).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pinned(settings: Settings) -> dict[str, Any]:
    fields = {name: value for name, value in record(settings).items() if name not in FREE}
    fields["drafter"] = {name: value for name, value in fields["drafter"].items() if name != "model"}
    return fields | {"job": {"max_prompt_tokens": settings.job.max_prompt_tokens}}


def _versions(*packages: str) -> dict[str, str]:
    found = {package.name: package.version for package in importlib.metadata.distributions()}
    return {package: found.get(package, "not installed") for package in packages}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, node
