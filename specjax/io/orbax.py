"""Orbax directories: the params by name, as Orbax stores them, and a JSON file with everything else."""

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
from jax.sharding import NamedSharding, PartitionSpec

from specjax.io.files import MAX_JSON_BYTES, read_json
from specjax.io.weights import Checkpoint, Cut, check_ids, check_layers, check_tensors, per_tensor, shown
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
    params = _by_name(checkpoint.params)
    check_tensors(directory, _shapes(params), _shapes(_abstract_params(checkpoint.config)))
    directory.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / _PARAMS, args=ocp.args.PyTreeSave(params))
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
    abstract = _abstract_params(config, dtype, sharding)
    check_tensors(directory, _shapes(stored), _shapes(abstract))
    restored = _restore(directory / _PARAMS, _by_name(abstract))
    treedef = jax.tree.structure(abstract)
    cuts = list(zip(restored, per_tensor(sharding, treedef), strict=True))
    placed = [where.place(restored.pop(name)) if isinstance(where, Cut) else restored[name] for name, where in cuts]
    params = treedef.unflatten(placed)
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


def _checkpointer() -> ocp.Checkpointer:
    """Uncompressed, so that what a file claims to hold can be checked against its size, and loading is a copy."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


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
        with _checkpointer() as checkpointer:
            stored = checkpointer.metadata(path.absolute()).item_metadata
        claimed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored.tree))
    except Exception as error:  # whatever the storage library meets in damaged files
        raise ValueError(f"expected {path} to be an Orbax checkpoint, got: {error!r}") from error
    if claimed > num_bytes:
        raise ValueError(f"expected {path} to hold {claimed} bytes of weights, got {num_bytes} in all")
    return stored.tree


def _restore(path: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restores straight onto the shardings of `target`, never more at once than the largest tensor."""
    restored: dict[str, jax.Array] = {}
    try:
        with _checkpointer() as checkpointer:
            for group in _groups(target):
                restore_args = ocp.checkpoint_utils.construct_restore_args(group)
                args = ocp.args.PyTreeRestore(item=group, restore_args=restore_args, partial_restore=True)
                restored |= jax.block_until_ready(checkpointer.restore(path.absolute(), args=args))
    except Exception as error:  # whatever the storage library meets in damaged files
        raise ValueError(f"expected {path} to be a whole Orbax checkpoint, got: {error!r}") from error
    return {name: restored[name] for name in target}


def _groups(target: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Runs of tensors that are together no larger than the largest one."""
    limit = max(leaf.size for leaf in target.values())
    groups, room = [], 0
    for name, leaf in target.items():
        if leaf.size > room:
            groups.append({})
            room = limit
        groups[-1][name] = leaf
        room -= leaf.size
    return groups


def _abstract_params(config: TransformerConfig, dtype: Any = np.float32, sharding: Any = None) -> Any:
    """The params with a `jax.ShapeDtypeStruct` at each leaf."""
    shapes, treedef = jax.tree.flatten(param_shapes(config), is_leaf=_is_shape)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=_first_sharding(where) or default)
        for shape, where in zip(shapes, per_tensor(sharding, treedef), strict=True)
    ]
    return treedef.unflatten(leaves)


def _first_sharding(where: Any) -> Any:
    """Where a tensor is restored to. What has to be padded or repeated is first read whole by every device."""
    if not isinstance(where, Cut):
        return where
    stays = all(line is None for line in where.sources)
    return where.sharding if stays else NamedSharding(where.sharding.mesh, PartitionSpec())


def _by_name(params: Any) -> dict[str, Any]:
    """Leaves by name, such as `layers.0.q`, in the order of the pytree."""
    paths = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in _by_name(params).items()}


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
