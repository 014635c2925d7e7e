"""From tensors on disk to params on devices, one tensor at a time, whatever the file format."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.config import TransformerConfig
from specjax.models.params import param_shapes

_BLOCK_ELEMENTS = 1 << 20
"""Elements read at once (4 MiB in float32): all that is held beside the tensor under construction."""
_NAMES_SHOWN = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model in memory, with what its files say about it."""

    config: TransformerConfig
    params: Any
    """Param pytree laid out as `models.params.param_shapes`."""
    eos_ids: tuple[int, ...]
    """Ids that end a text; empty when the files name none."""
    bos_id: int | None
    source: Path
    """The directory or file it was read from, where its tokenizer lies too."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor on disk, read a few rows at a time."""

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    """Rows `start` to `stop` as an array of its own (never a view of a mapped file). Vectors are read whole."""
    row_order: np.ndarray | None = None
    """`[rows]` integers: stored row i is row `row_order[i]` of the model's matrix. None: the same order."""
    read_block: Callable[[slice, slice], np.ndarray] | None = None
    """Some rows and columns of a matrix; None: rows can only be read whole."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Where a tensor goes, and what is made of it before it is cut there."""

    sharding: NamedSharding
    sources: tuple[np.ndarray | None, ...]
    """For each dimension the indices that make it up, -1 for zeros; None where it stays as it is."""

    def lines(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """The indices for each dimension of a tensor of this shape."""
        return [np.arange(size) if line is None else line for size, line in zip(shape, self.sources, strict=True)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is made of a tensor of this shape."""
        return tuple(map(len, self.lines(shape)))

    def place(self, leaf: jax.Array) -> jax.Array:
        """Does to an array what a load does to a tensor on disk."""
        if all(line is None for line in self.sources):
            return jax.device_put(leaf, self.sharding)
        index = np.ix_(*self.lines(leaf.shape))
        whole = jax.device_put(leaf, NamedSharding(self.sharding.mesh, PartitionSpec()))
        take = jax.jit(lambda x: x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False))
        return jax.jit(take, out_shardings=self.sharding)(whole)


def tensor_names(
    config: TransformerConfig, top: Mapping[str, str], layer: Mapping[str, str], prefix: str
) -> dict[str, Any]:
    """The name of every param in a file format, as a pytree with the structure of the params.

    Args:
      config: the architecture.
      top: module name of each param outside the layers.
      layer: module name of each param of a layer, biases under the name of their matrix.
      prefix: what comes before a layer's module names, with `{}` for the layer's number.

    Returns:
      `param_shapes(config)` with a name at each leaf.
    """

    def named(modules: Mapping[str, str], param: str) -> str:
        return modules[param.removesuffix("_bias")] + (".bias" if param.endswith("_bias") else ".weight")

    shapes = param_shapes(config)
    layers = tuple(
        {param: prefix.format(index) + named(layer, param) for param in params}
        for index, params in enumerate(shapes["layers"])
    )
    return {param: layers if param == "layers" else named(top, param) for param in shapes}


def load_params(
    path: Path,
    config: TransformerConfig,
    tensors: Mapping[str, StoredTensor],
    names: Any,
    *,
    dtype: np.dtype,
    sharding: Any,
) -> Any:
    """Reads every tensor of a model onto its devices.

    Args:
      path: where the tensors lie, for error messages.
      config: the architecture.
      tensors: what is on disk, by name.
      names: the name of each param, from `tensor_names`.
      dtype: of the params; each tensor is converted on the host.
      sharding: None, one `jax.sharding.Sharding`, or a pytree of them (or of `Cut`) like the params.

    Returns:
      The params.

    Raises:
      ValueError: missing, unexpected or misshapen tensors.
    """
    order, treedef = jax.tree.flatten(names)
    shapes = treedef.flatten_up_to(param_shapes(config))
    shardings = per_tensor(sharding, treedef)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(path, found, dict(zip(order, shapes, strict=True)))
    placed = [_to_device(tensors[name], dtype, where) for name, where in zip(order, shardings, strict=True)]
    return treedef.unflatten(placed)


def check_tensors(path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the shapes on disk with those of the architecture.

    Raises:
      ValueError: one message with all that is missing, unexpected or misshapen.
    """
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": misshapen,
    }
    listed = [f"{len(names)} {kind} ({shown(names)})" for kind, names in problems.items() if names]
    if listed:
        raise ValueError(f"expected the tensors that the config in {path} implies, got {', '.join(listed)}")


def check_layers(path: Path, num_layers: Any, num_tensors: int) -> None:
    """Refuses a layer count that the tensors on disk cannot fill, before anything is built for each layer.

    Raises:
      ValueError: more layers than tensors.
    """
    if isinstance(num_layers, int | float) and num_layers > num_tensors:
        raise ValueError(f"expected at most one layer for each tensor in {path}, got {num_layers} for {num_tensors}")


def check_ids(path: Path, ids: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """Special token ids in ascending order, once each.

    Raises:
      ValueError: not an id of the vocabulary.
    """
    wrong = [value for value in ids if type(value) is not int or not 0 <= value < vocab_size]
    if wrong:
        raise ValueError(f"expected special token ids between 0 and {vocab_size - 1} in {path}, got {wrong}")
    return tuple(sorted(set(ids)))


def shown(names: Sequence[str]) -> str:
    """The first names of a list, for an error message."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def per_tensor(sharding: Any, treedef: Any) -> list[Any]:
    """One sharding (or None) for each leaf of a tree, in order."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return [sharding] * treedef.num_leaves
    return treedef.flatten_up_to(sharding)


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors are equal, compared a few rows at a time."""
    if first.shape != second.shape:
        return False
    return all(np.array_equal(first.read(*rows), second.read(*rows)) for rows in _row_blocks(first.shape))


def to_host(tensor: StoredTensor, dtype: np.dtype, wanted: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """Reads a tensor into memory of its own, converting a few rows at a time.

    Args:
      tensor: what is on disk.
      dtype: of the result.
      wanted: for each dimension the indices to take, -1 for zeros; None takes everything. What is not wanted is not
        read, as far as the format can skip it.
    """
    rows, *columns = [np.arange(size) for size in tensor.shape] if wanted is None else wanted
    if tensor.row_order is not None:
        rows = np.where(rows < 0, -1, np.argsort(tensor.row_order)[rows])
    out = np.zeros((len(rows), *map(len, columns)), dtype)
    for start, stop in _row_blocks(tensor.shape):
        places = np.flatnonzero((rows >= start) & (rows < stop))
        if len(places):
            if columns:  # vectors are read whole
                start, stop = int(rows[places].min()), int(rows[places].max()) + 1
            out[_run(places)] = _read(tensor, start, stop, columns)[_run(rows[places] - start)]
    return out


def _read(tensor: StoredTensor, start: int, stop: int, columns: Sequence[np.ndarray]) -> np.ndarray:
    """Rows `start` to `stop`, of a matrix the wanted columns only."""
    if not columns:
        return tensor.read(start, stop)
    valid = columns[0] >= 0
    if not valid.any():
        return np.zeros((stop - start, len(valid)))
    first, last = int(columns[0][valid].min()), int(columns[0].max()) + 1
    if tensor.read_block is None:
        block = tensor.read(start, stop)[:, first:last]
    else:
        block = tensor.read_block(slice(start, stop), slice(first, last))
    picked = block[:, _run(np.where(valid, columns[0] - first, 0))]
    return picked if valid.all() else np.where(valid, picked, 0)


def _run(index: np.ndarray) -> slice | np.ndarray:
    """The index as a slice, which copies nothing, if it is one."""
    first = int(index[0])
    return slice(first, first + len(index)) if (np.diff(index) == 1).all() else index


def _row_blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    rows = shape[0]
    step = rows if len(shape) == 1 else max(1, _BLOCK_ELEMENTS // shape[1])
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _to_device(tensor: StoredTensor, dtype: np.dtype, where: jax.sharding.Sharding | Cut | None) -> jax.Array:
    """Places a tensor and waits, so that the host never holds two of them; what goes nowhere near is not read."""
    if where is None:
        return jax.device_put(to_host(tensor, dtype)).block_until_ready()
    if isinstance(where, Cut):
        sharding, lines = where.sharding, where.lines(tensor.shape)
    else:
        sharding, lines = where, [np.arange(size) for size in tensor.shape]

    parts: dict[tuple[bytes, ...], np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        wanted = [line[piece] for piece, line in zip(index, lines, strict=True)]
        name = tuple(line.tobytes() for line in wanted)
        if name not in parts:
            parts[name] = to_host(tensor, dtype, wanted)
        return parts[name]

    shape = tuple(map(len, lines))
    return jax.make_array_from_callback(shape, sharding, part).block_until_ready()
