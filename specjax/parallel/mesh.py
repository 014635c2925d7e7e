"""The mesh: rows of the batch along one axis, parts of each matrix along the other."""

from collections.abc import Sequence
from typing import Any

import jax
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
      ValueError: not that many devices.
    """
    devices = jax.devices() if devices is None else devices
    if min(data, model) < 1 or data * model > len(devices):
        raise ValueError(f"expected a mesh of 1 to {len(devices)} devices, got data={data} and model={model}")
    return jax.make_mesh((data, model), (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices[: data * model])
