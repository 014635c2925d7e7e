"""The mesh: rows of the batch along one axis, parts of each matrix along the other."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

DATA, MODEL = "data", "model"
"""Names of the mesh axes."""


def make_mesh(data: int = 1, model: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A `data` x `model` mesh over the first devices, neighbours in the model axis as near as the hardware has them.

    Args:
      data: groups of devices, each with its own rows of the batch.
      model: devices that share one copy of the weights.
      devices: to choose from; None: all devices of all processes.

    Raises:
      ValueError: not that many devices, or a number that no box of a TPU slice has.
    """
    devices = jax.devices() if devices is None else devices
    if min(data, model) < 1 or data * model > len(devices):
        raise ValueError(f"expected a mesh of 1 to {len(devices)} devices, got data={data} and model={model}")
    taken = devices[: data * model]
    try:
        grid = mesh_utils.create_device_mesh((data, model), taken, allow_split_physical_axes=True)
    except AssertionError as error:  # how JAX says that chips are no box
        raise ValueError(
            f"expected as many devices as a box of the slice has ({len(devices)}, for example), got {data} x {model}"
        ) from error
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in a text such as `data=2,model=4`; an axis that it leaves out has size 1.

    Raises:
      ValueError: a text of another form.
    """
    pairs = [re.fullmatch(f"({DATA}|{MODEL})=([1-9][0-9]*)", part) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) != len(pairs):
        raise ValueError(f"expected --mesh like data=2,model=4, got {text!r}")
    return {axis: sizes.get(axis, 1) for axis in (DATA, MODEL)}
