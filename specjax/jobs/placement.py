"""Which devices a run uses, and through which driver."""

import dataclasses
from typing import Literal

import jax

from specjax.parallel.drivers import SINGLE_DEVICE, Driver
from specjax.parallel.launch import check_launch, start
from specjax.parallel.mesh import DATA, MODEL, make_mesh, parse_mesh
from specjax.parallel.pmapped import PMap
from specjax.parallel.sharded import Jit, ShardMap

MESH_DRIVERS = {"jit": Jit, "shard_map": ShardMap, "pmap": PMap}
"""Names of drivers on a command line and in records."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """What runs where."""

    driver: Literal["auto", "jit", "shard_map", "pmap"] = "auto"
    """`auto` is `shard_map`, or plain `jit` on one device."""
    mesh: str | None = None
    """Sizes of the axes, `data=2,model=4`, one by default; None: all devices in the model axis."""
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        check_launch(self.coordinator_address, self.num_processes, self.process_id)
        if self.driver == "pmap" and self.coordinator_address is not None:
            raise ValueError("expected --parallel shard_map or jit with several processes, got pmap")
        if self.mesh is not None:
            parse_mesh(self.mesh)

    @property
    def num_groups(self) -> int:
        """Size of the data axis."""
        return 1 if self.mesh is None else parse_mesh(self.mesh)[DATA]

    def start(self) -> None:
        """Joins the other processes. See `launch.start`."""
        start(self.coordinator_address, self.num_processes, self.process_id)

    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh; looks at what this machine has."""
        return {DATA: 1, MODEL: jax.device_count()} if self.mesh is None else parse_mesh(self.mesh)

    def build(self) -> Driver:
        """The driver.

        Raises:
          ValueError: a mesh of other than all devices of several processes, or of more than there are.
        """
        if self.driver == "auto" and self.mesh is None and jax.device_count() == 1:
            return SINGLE_DEVICE
        sizes = self.sizes()
        mesh = make_mesh(sizes[DATA], sizes[MODEL])
        if jax.process_count() > 1 and mesh.size != jax.device_count():
            raise ValueError(f"expected --mesh of all {jax.device_count()} devices of all processes, got {mesh.size}")
        return MESH_DRIVERS["shard_map" if self.driver == "auto" else self.driver](mesh)
