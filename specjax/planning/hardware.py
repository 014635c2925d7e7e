"""TPU generations: public figures, and the descriptions that libtpu compiles for."""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from jax.experimental import topologies

FLOAT32_PASSES = 6
"""bfloat16 products that one float32 product takes at the precision that `runtime.configure` sets, "highest"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of one chip: published ones, but for what the compiler says of its memory."""

    hbm_bytes: float
    """What the compiler lets the programs of one device use; a few percent less than there is."""
    hbm_bandwidth: float
    """Bytes per second."""
    flops: float
    """Operations per second: bfloat16 ones, or what `in_dtype` makes of them."""
    link_bandwidth: float
    """Bytes per second through one link to a neighbour, both directions together."""

    def in_dtype(self, dtype: str) -> "Chip":
        """The same with its peak for weights of a dtype, "bfloat16" or "float32"."""
        return dataclasses.replace(self, flops=self.flops / FLOAT32_PASSES) if dtype == "float32" else self


CHIPS = {
    "v4": Chip(hbm_bytes=30.75 * 2**30, hbm_bandwidth=1.2e12, flops=275e12, link_bandwidth=9e10),
    "v5e": Chip(hbm_bytes=15.75 * 2**30, hbm_bandwidth=0.819e12, flops=197e12, link_bandwidth=9e10),
    "v5p": Chip(hbm_bytes=95.73 * 2**30, hbm_bandwidth=2.765e12, flops=459e12, link_bandwidth=1.8e11),
    "v6e": Chip(hbm_bytes=31.24 * 2**30, hbm_bandwidth=1.638e12, flops=918e12, link_bandwidth=1.8e11),
}
"""Memory: refusals of libtpu 0.0.52. Bandwidth and peak: the Cloud TPU documentation. Links:
jax-ml.github.io/scaling-book, chapter 2."""
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
"""Both cores of a v4 chip are one device, as on its VMs; libtpu would describe each core as one."""
_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu asks of the machine it runs on, so that it does not go looking; the topology is given by name."""


def check_topology(name: str) -> tuple[Chip, int]:
    """The chip of a topology such as `v5e:2x4`, and how many of them it has.

    Raises:
      ValueError: another name.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    if found is None or found[1] not in CHIPS:
        raise ValueError(f"expected a topology like v5e:2x4 or v5p:2x2x4 of {', '.join(CHIPS)}, got {name!r}")
    return CHIPS[found[1]], math.prod(map(int, found[2].split("x")))


def describe(name: str) -> list[Any]:
    """The devices of a topology, to compile for; none of them is there.

    Raises:
      ValueError: libtpu is not installed, or has no such topology.
    """
    check_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("expected libtpu, the compiler for TPUs, got none: pip install -e '.[tpu-plan]'")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        options = _OPTIONS.get(name.partition(":")[0], {})
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except Exception as error:  # libtpu reports through several types
        raise ValueError(f"expected a topology that libtpu knows, got {name!r}: {error}") from error
