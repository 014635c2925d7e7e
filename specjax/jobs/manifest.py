"""What a job's output was made with: settings and models that may not change until it is whole, and where it ran."""

import datetime
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.io.files import read_json, write_whole
from specjax.io.sources import resolve_model
from specjax.jobs.parts import PATTERN
from specjax.jobs.settings import DraftModel, Settings, record
from specjax.parallel.launch import check_same
from specjax.verify import ExactMatch

NAME = "manifest.json"
FREE = frozenset(
    {"model", "prompt", "prompts", "batch_size", "output", "compare", "stream", "per_position", "compilation_cache"}
    | {"parallel"}
)
"""Settings that may change between two starts: no token depends on them (a model's name does not make it the same)."""
_PINNED = ("format", "settings", "model", "draft_model", "prng_implementation", "threefry_partitionable")
_WARNED = ("matmul_precision", "mesh", "versions")
_FREE_OF_DRAFTER = frozenset({"model", "sharded"})


def build_manifest(settings: Settings, *, samples: bool) -> dict[str, Any]:
    """The manifest of a job with these settings, on this machine.

    Args:
      settings: of the job.
      samples: whether any row has a temperature above 0.

    Raises:
      ValueError: a model that cannot be found.
    """
    return {
        "format": 2,
        "began_at": datetime.datetime.now().isoformat(timespec="seconds"),
        "settings": _pinned(settings),
        **_models(settings),
        "lossless_level": lossless_level(settings, samples=samples),
        "model_name": settings.model,
        "prng_implementation": str(jax.random.key_impl(jax.random.key(0))),
        "threefry_partitionable": jax.config.values["jax_threefry_partitionable"],
        **environment(settings),
    }


def lossless_level(settings: Settings, *, samples: bool) -> str:
    """What all rows of a job have in common with plain decoding: their `tokens` (up to rounding) or their law."""
    same = settings.dtype == "float32" and (not samples or isinstance(settings.verifier, ExactMatch))
    return "tokens" if same else "distribution"


def environment(settings: Settings) -> dict[str, Any]:
    """Where a start runs: what may be another at the next one, and may round differently."""
    device = jax.devices()[0]
    return {
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
        "mesh": {
            "platform": device.platform,
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            **settings.parallel.sizes(),
        },
        "versions": {"python": platform.python_version(), **_versions("specjax", "jax", "jaxlib")},
    }


def begin_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Makes a manifest that of a directory, unless there is one already.

    Raises:
      ValueError: rows have been completed there, and no manifest says with what.
    """
    path = directory / NAME
    if path.exists():
        return
    if any(part.stat().st_size for part in directory.glob(PATTERN)):
        raise ValueError(
            f"expected {path} beside the completed rows, got none: without it nothing says what they were made with. "
            "Put it back, or choose another --output-dir"
        )
    write_whole(path, _text(manifest), replace=False)  # another process may have begun at the same time


def check_manifest(directory: Path, manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Holds a manifest against the one in a directory.

    Returns:
      The one that the job was begun with; and what differs without being refused, such as a version of a library:
      tokens may then differ by rounding.

    Raises:
      ValueError: no manifest there; or a setting, a model or a kind of random numbers that is not the one which the
        output was begun with: the message names it.
    """
    path = directory / NAME
    begun = read_json(path)
    before, now = (_compared(each, _PINNED) for each in (begun, manifest))
    for name in before | now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"expected {name.removeprefix('settings.')} = {before.get(name)!r}, with which this output was begun "
                f"({path}), got {now.get(name)!r}: go on with that, or choose another --output-dir"
            )
    before, now = (_compared(each, _WARNED) for each in (begun, manifest))
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    return begun, [f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed]


def finish_manifest(directory: Path, begun: Mapping[str, Any], level: str, starts: Sequence[Mapping[str, Any]]) -> None:
    """Writes down what is known once every row is complete.

    Args:
      directory: of the job.
      begun: the manifest that it was begun with.
      level: the `lossless_level` of all rows, to which some may have been added.
      starts: process, number and environment of each start that completed any row.
    """
    write_whole(directory / NAME, _text({**begun, "lossless_level": level, "starts": starts}))


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
    fields["drafter"] = {name: value for name, value in fields["drafter"].items() if name not in _FREE_OF_DRAFTER}
    return fields | {"job": {"max_prompt_tokens": settings.job.max_prompt_tokens}}


def _versions(*packages: str) -> dict[str, str]:
    found = {package.name: package.version for package in importlib.metadata.distributions()}
    return {package: found.get(package, "not installed") for package in packages}


def _text(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n"


def _compared(manifest: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The leaves below some names, as JSON has them."""
    return dict(_leaves(json.loads(json.dumps({name: manifest.get(name) for name in names}))))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, node
