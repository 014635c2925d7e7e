"""Orbax directories: the params as Orbax stores them, and a JSON file with everything else."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from specjax.io.files import MAX_JSON_BYTES, read_json
from specjax.io.weights import Checkpoint, check_ids, check_layers, check_tensors, per_tensor, shown
from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.params import param_shapes

SETTINGS = "specjax.json"
"""Written last: a directory without it is no checkpoint."""
_PARAMS = "params"
_FORMAT = 1


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint that `load_checkpoint` reads back bit for bit.

    Args:
      path: a directory that is new or empty.
      checkpoint: what to write.

    Raises:
      ValueError: a directory with something in it, or params that do not fit the config.
    """
    directory = Path(path).absolute()
    check_new(directory)
    check_tensors(directory, _shapes(checkpoint.params), _expected(checkpoint.config))
    directory.mkdir(parents=True, exist_ok=True)
    with _checkpointer(None) as checkpointer:
        checkpointer.save(directory / _PARAMS, args=ocp.args.PyTreeSave(checkpoint.params))
    settings = {
        "format": _FORMAT,
        "config": dataclasses.asdict(checkpoint.config),
        "eos_ids": checkpoint.eos_ids,
        "bos_id": checkpoint.bos_id,
        "files": _sizes(directory / _PARAMS),
    }
    if jax.process_index() == 0:
        (directory / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def check_new(directory: Path) -> None:
    """Refuses a directory with something in it: nothing is ever overwritten.

    Raises:
      ValueError: it exists and is not an empty directory.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"expected {directory} to be a new or empty directory, got one with files in it")


def load(directory: Path, dtype: np.dtype, sharding: Any) -> Checkpoint:
    """Loads a directory that `save_checkpoint` wrote. See `checkpoint.load_checkpoint`."""
    settings, config, stored = _open(directory)
    bos_id = settings.get("bos_id")
    eos_ids = check_ids(directory, settings.get("eos_ids", []), config.vocab_size)
    check_ids(directory, [] if bos_id is None else [bos_id], config.vocab_size)
    check_tensors(directory, _shapes(stored), _expected(config))
    params = _restore(directory / _PARAMS, _abstract_params(config, dtype, sharding))
    return Checkpoint(config=config, params=params, eos_ids=eos_ids, bos_id=bos_id, source=directory)


def read_config(directory: Path) -> TransformerConfig:
    """The architecture of a directory that `save_checkpoint` wrote."""
    return _open(directory)[1]


def _open(directory: Path) -> tuple[Mapping[str, Any], TransformerConfig, Any]:
    """The settings, the config in them, and the shapes and dtypes of the stored params."""
    path = directory / SETTINGS
    settings = read_json(path)
    if settings.get("format") != _FORMAT:
        raise ValueError(f"expected format {_FORMAT} in {path}, got {settings.get('format')!r}")
    sizes = _sizes(directory / _PARAMS)
    _check_files(path, settings.get("files"), sizes)
    stored = _read_metadata(directory / _PARAMS, sum(sizes.values()))
    try:
        fields = dict(settings["config"])
        check_layers(path, fields["num_layers"], len(jax.tree.leaves(stored)))
        rope = _record(RopeConfig, fields.pop("rope"))
        return settings, _record(TransformerConfig, fields | {"rope": rope}), stored
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"expected {path} to describe a model, got: {error!r}") from error


# ---- Params ----


def _checkpointer(concurrent_bytes: int | None) -> ocp.Checkpointer:
    """Uncompressed, so that what a file claims to hold can be checked against its size, and loading is a copy."""
    handler = ocp.BasePyTreeCheckpointHandler(use_compression=False, restore_concurrent_bytes=concurrent_bytes)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=handler))


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of each file below a directory."""
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def _check_files(path: Path, recorded: Any, sizes: Mapping[str, int]) -> None:
    """Finds what was cut or lost before the storage library meets it."""
    if not isinstance(recorded, Mapping):
        raise ValueError(f"expected {path} to list the files of the weights, got {recorded!r}")
    wrong = [f"{name} of {sizes.get(name)} bytes" for name, size in recorded.items() if sizes.get(name) != size]
    if wrong:
        raise ValueError(f"expected the files that {path} lists, got {len(wrong)} others: {shown(wrong)}")
    if any(size > MAX_JSON_BYTES for name, size in sizes.items() if "/" not in name):
        raise ValueError(f"expected metadata of at most {MAX_JSON_BYTES} bytes beside {path}, got a larger file")


def _read_metadata(path: Path, num_bytes: int) -> Any:
    """Shapes and dtypes of the stored params, which must not claim more bytes than there are."""
    try:
        with _checkpointer(None) as checkpointer:
            stored = checkpointer.metadata(path.absolute()).item_metadata
        claimed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored.tree))
    except Exception as error:  # whatever the storage library meets in damaged files
        raise ValueError(f"expected {path} to be an Orbax checkpoint, got: {error!r}") from error
    if claimed > num_bytes:
        raise ValueError(f"expected {path} to hold {claimed} bytes of weights, got {num_bytes} in all")
    return stored.tree


def _restore(path: Path, target: Any) -> Any:
    """Restores straight onto the shardings of `target`, with about one tensor of the largest size in flight."""
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    try:
        with _checkpointer(largest + 1) as checkpointer:
            args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
            return checkpointer.restore(path.absolute(), args=args)
    except Exception as error:  # whatever the storage library meets in damaged files
        raise ValueError(f"expected {path} to be a whole Orbax checkpoint, got: {error!r}") from error


def _abstract_params(config: TransformerConfig, dtype: np.dtype, sharding: Any) -> Any:
    shapes, treedef = jax.tree.flatten(param_shapes(config), is_leaf=_is_shape)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=where or default)
        for shape, where in zip(shapes, per_tensor(sharding, treedef), strict=True)
    ]
    return treedef.unflatten(leaves)


def _expected(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    paths = jax.tree.leaves_with_path(param_shapes(config), is_leaf=_is_shape)
    return {jax.tree_util.keystr(path, simple=True, separator="."): shape for path, shape in paths}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    paths = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in paths}


def _is_shape(node: Any) -> bool:
    return type(node) is tuple and all(type(size) is int for size in node)


# ---- Settings ----


def _record(kind: type, fields: Any) -> Any:
    """Builds a config record from JSON, every field checked against its annotation."""
    hints = typing.get_type_hints(kind)
    if not isinstance(fields, Mapping):
        raise ValueError(f"expected the fields of {kind.__name__}, got {fields!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    wrong = {name: value for name, value in values.items() if name not in hints or not _fits(value, hints[name])}
    if wrong:
        raise ValueError(f"expected the fields of {kind.__name__}, got {wrong}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type; integers in these records are sizes, hence positive."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in arguments
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return type(value) is tuple and all(_fits(item, arguments[0]) for item in value)
    if hint is int:
        return type(value) is int and value > 0
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
