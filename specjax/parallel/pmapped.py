"""The pmap driver: the classic convention, in which every array has an axis of devices in front.

`pmap` has one axis, over which models are cut. On a mesh with several groups of devices each group gets a call of its
own, on its own rows, and the calls run at the same time. Arrays are stacked over all devices, group by group; a group's
part of them is the same buffers under another shape, so nothing is copied between calls.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.parallel.drivers import ALL_STEPS, Driver, Inputs
from specjax.parallel.mesh import DATA, MODEL
from specjax.parallel.specs import shard_params
from specjax.slots import Slots, empty_slots, insert
from specjax.types import DecodeState, Output, Params, SamplingParams

_DEVICES = P((DATA, MODEL))


@dataclasses.dataclass(frozen=True)
class PMap(Driver):
    """`jax.pmap` over the model axis, once for each group of devices, on one host."""

    mesh: Mesh

    def __post_init__(self) -> None:
        if self.mesh.is_multi_process:
            raise ValueError("expected pmap on the devices of one process, got several: use shard_map")

    def place(self, params: Params, config: DecodeConfig) -> Params:
        """Each device's part of the params behind an axis of devices.

        Memory never holds the weights twice. Params that were placed on this mesh before (a sharded load,
        `shard_params`) are taken over: their buffers live on in what is returned, and neither they nor arrays that
        `shard_params` took their buffers from can be used any more. Other params are left as they are.
        """
        taken = {id(leaf) for leaf in jax.tree.leaves(params) if _is_on_mesh(leaf)}
        leaves, tree = jax.tree.flatten(shard_params(params, config, self.mesh))
        names, parts = [*map(id, leaves)], {id(leaf): leaf for leaf in leaves}  # two models may share arrays
        del leaves  # so that each array is freed as soon as it is stacked
        for name in parts:
            parts[name] = self._stack_shards(parts[name], taken=name in taken)
        return tree.unflatten([parts[name] for name in names])

    def decode_steps(
        self,
        params: Params,
        state: DecodeState,
        sampling: SamplingParams,
        num_steps: int = ALL_STEPS,
        least_running: int = 1,
        *,
        config: DecodeConfig,
    ) -> DecodeState:
        """`specjax.decode_steps`. See `Driver.decode_steps`.

        Raises:
          ValueError: rows to be counted over several groups, which run apart.
        """
        if least_running > 1 and self.num_groups > 1:
            raise ValueError(
                f"expected data=1 with pmap to stop when a row is done, got data={self.num_groups}: use shard_map"
            )
        state = jax.tree.map(self._put, state)  # what the caller has replaced may lie elsewhere
        limits = (self._everywhere(jnp.int32(limit)) for limit in (num_steps, least_running))
        return self._run(decode.decode_steps, params, state, sampling, *limits, config=config, donated=(1,))

    def empty_slots(self, row: Slots, num_slots: int, *, config: DecodeConfig) -> Slots:
        """`slots.empty_slots`. See `Driver.empty_slots`."""
        return self._run(empty_slots, row, num_slots=num_slots // self.num_groups)

    def insert(self, slots: Slots, rows: Slots, slot: int, *, config: DecodeConfig) -> Slots:
        """`slots.insert`. See `Driver.insert`."""
        slots = jax.tree.map(self._put, slots)  # as above
        return self._run(insert, slots, rows, self._everywhere(jnp.int32(slot)), pad_id=config.pad_id, donated=(0,))

    def to_host(self, rows: Any) -> Any:
        """The arrays in NumPy, without the axis of devices."""
        models = self.mesh.shape[MODEL]
        return jax.tree.map(lambda leaf: np.array(leaf)[::models].reshape(-1, *leaf.shape[2:]), rows)

    def to_devices(self, rows: Any) -> Any:
        """Gives every device the rows of its group."""

        def stack(leaf: jax.Array) -> jax.Array:
            groups = jnp.arange(leaf.shape[0]).reshape(self.num_groups, -1)
            return self._put(jnp.asarray(leaf)[jnp.repeat(groups, self.mesh.shape[MODEL], axis=0)])

        return jax.tree.map(stack, rows)

    def _generate(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> Output:
        inputs = self._stack(inputs)
        output = self._run(decode.generate, params, *inputs, config=config, max_new_tokens=max_new_tokens)
        return jax.tree.map(jnp.asarray, self.to_host(output))

    def _prefill(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> DecodeState:
        inputs = self._stack(inputs)
        return self._run(decode.prefill, params, *inputs, config=config, max_new_tokens=max_new_tokens)

    def _run(self, function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = (), **statics: Any) -> Any:
        """Calls every group's program, then puts their results together."""
        groups = [tuple(devices) for devices in self.mesh.devices]
        parts = [jax.tree.map(partial(_part, devices=devices), arguments) for devices in groups]
        programs = [program(function, devices, donated, **statics) for devices in groups]
        results = [run(*part) for run, part in zip(programs, parts, strict=True)]
        return jax.tree.map(self._join, *results)

    def _stack(self, inputs: Inputs) -> Inputs:
        *rows, pace = inputs
        if pace is not None:
            acceptance = self.to_devices(pace.acceptance)
            pace = dataclasses.replace(pace, acceptance=acceptance, costs=self._everywhere(pace.costs))
        return *self.to_devices(rows), pace

    def _everywhere(self, leaf: jax.Array) -> jax.Array:
        return self._put(jnp.broadcast_to(leaf, (self.mesh.size, *leaf.shape)))

    def _put(self, stacked: jax.Array) -> jax.Array:
        return jax.device_put(stacked, NamedSharding(self.mesh, _DEVICES))

    def _stack_shards(self, leaf: jax.Array, *, taken: bool) -> jax.Array:
        """What each device has of an array behind the axis of devices: in the same buffers, if they may be taken."""
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        stack = _stack_taken if taken else _stack
        return self._join(*(stack(shards[device]) for device in self.mesh.devices.flat))

    def _join(self, *parts: jax.Array) -> jax.Array:
        """The arrays of the groups as one array of all devices."""
        shape, sharding = (self.mesh.size, *parts[0].shape[1:]), NamedSharding(self.mesh, _DEVICES)
        buffers = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)


_stack = jax.jit(lambda shard: shard[None])
_stack_taken = jax.jit(lambda shard: shard[None], donate_argnums=0)


def _part(leaf: jax.Array, devices: tuple[Any, ...]) -> jax.Array:
    """What lies on a group's devices."""
    buffers = {shard.device: shard.data for shard in leaf.addressable_shards}
    sharding = NamedSharding(Mesh(np.array(devices), (MODEL,)), P(MODEL))
    mine = [buffers[device] for device in devices]
    return jax.make_array_from_single_device_arrays((len(devices), *leaf.shape[1:]), sharding, mine)


@functools.cache
def program(function: Callable[..., Any], devices: tuple[Any, ...], donated: tuple[int, ...], **statics: Any) -> Any:
    """The program of one group of devices, as `jax.pmap` makes it.

    Args:
      function: of `decode`.
      devices: along the model axis.
      donated: arguments whose buffers the results may take.
      **statics: keywords of the function.
    """
    return jax.pmap(partial(function, **statics), axis_name=MODEL, devices=devices, donate_argnums=donated)
