"""The drivers whose arrays are global: `shard_map`, the default on several devices, and `jit`.

Under `shard_map` the whole of `generate` runs on each device, with sums over the model axis where the model asks for
them. The data axis needs no exchange at all: each group of devices leaves the loop with its own last row. Only
`decode_steps` counts the running rows of all groups before each step, so that all of them return together.

Under `jit` XLA itself cuts the single-device program, by where its arguments lie. All rows then step together.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.parallel.drivers import ALL_STEPS, Driver, Inputs
from specjax.parallel.mesh import DATA
from specjax.parallel.specs import ROWS, on_mesh, pace_specs, param_specs, place, shard_params, slot_specs, state_specs
from specjax.slots import Slots, empty_slots, insert
from specjax.types import DecodeState, Output, Params, SamplingParams

_Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _OnMesh(Driver):
    mesh: Mesh
    row_axis: ClassVar[str | None]
    """Mesh axis over which running rows have to be counted; None: every device sees all rows."""

    @abc.abstractmethod
    def spread(self, run: _Function, config: DecodeConfig, in_specs: Any, out_specs: Any) -> _Function:
        """A function of `decode`, that takes a config, as a function of global arrays."""

    def place(self, params: Params, config: DecodeConfig) -> Params:
        """Puts the params on the mesh. See `shard_params`."""
        return shard_params(params, config, self.mesh)

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
        """`specjax.decode_steps`. See `Driver.decode_steps`."""
        limits = jnp.int32(num_steps), jnp.int32(least_running)
        return _decode_steps(params, state, sampling, *limits, driver=self, config=config)

    def empty_slots(self, row: Slots, num_slots: int, *, config: DecodeConfig) -> Slots:
        """`slots.empty_slots`. See `Driver.empty_slots`."""
        return _empty_slots(row, driver=self, config=config, num_slots=num_slots // self.num_groups)

    def insert(self, slots: Slots, rows: Slots, slot: int, *, config: DecodeConfig) -> Slots:
        """`slots.insert`. See `Driver.insert`."""
        return _insert(slots, rows, jnp.int32(slot), driver=self, config=config)

    def to_host(self, rows: Any) -> Any:
        """The arrays in NumPy, gathered from all processes."""
        if jax.process_count() > 1:
            rows = multihost_utils.process_allgather(rows, tiled=True)
        return jax.tree.map(np.array, rows)

    def to_devices(self, rows: Any) -> Any:
        """Deals the rows to the data axis."""
        return place(rows, ROWS, self.mesh)

    def _generate(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> Output:
        inputs = place(inputs, _input_specs(inputs), self.mesh)
        return _generate(params, inputs, driver=self, config=config, max_new_tokens=max_new_tokens)

    def _prefill(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> DecodeState:
        inputs = place(inputs, _input_specs(inputs), self.mesh)
        return _prefill(params, inputs, driver=self, config=config, max_new_tokens=max_new_tokens)


@dataclasses.dataclass(frozen=True)
class ShardMap(_OnMesh):
    """`jax.shard_map` over the (data, model) mesh."""

    row_axis = DATA

    def spread(self, run: _Function, config: DecodeConfig, in_specs: Any, out_specs: Any) -> _Function:
        """The function on each device; that what leaves it is equal along the model axis is known, not inferred."""
        mapped = partial(run, config=config)
        return jax.shard_map(mapped, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclasses.dataclass(frozen=True)
class Jit(_OnMesh):
    """`jax.jit` alone; the models' axes say only where the params lie."""

    row_axis = None

    def spread(self, run: _Function, config: DecodeConfig, in_specs: Any, out_specs: Any) -> _Function:
        """The function of whole arrays, its results where the next call wants them."""
        whole = on_mesh(config, target=None, draft=None)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), out_specs)
        return lambda *arguments: lax.with_sharding_constraint(run(*arguments, config=whole), shardings)


@partial(jax.jit, static_argnames=("driver", "config", "max_new_tokens"))
def _generate(params: Params, inputs: Inputs, *, driver: _OnMesh, config: DecodeConfig, max_new_tokens: int) -> Output:
    run = partial(decode.generate, max_new_tokens=max_new_tokens)
    return driver.spread(run, config, (param_specs(config), *_input_specs(inputs)), ROWS)(params, *inputs)


@partial(jax.jit, static_argnames=("driver", "config", "max_new_tokens"))
def _prefill(
    params: Params, inputs: Inputs, *, driver: _OnMesh, config: DecodeConfig, max_new_tokens: int
) -> DecodeState:
    run = partial(decode.prefill, max_new_tokens=max_new_tokens)
    specs = param_specs(config), *_input_specs(inputs)
    return driver.spread(run, config, specs, state_specs(config))(params, *inputs)


@partial(jax.jit, static_argnames=("driver", "config"), donate_argnames=("state",))
def _decode_steps(
    params: Params,
    state: DecodeState,
    sampling: SamplingParams,
    num_steps: jax.Array,
    least_running: jax.Array,
    *,
    driver: _OnMesh,
    config: DecodeConfig,
) -> DecodeState:
    run, specs = partial(decode.decode_steps, row_axis=driver.row_axis), state_specs(config)
    spread = driver.spread(run, config, (param_specs(config), specs, ROWS, P(), P()), specs)
    return spread(params, state, sampling, num_steps, least_running)


@partial(jax.jit, static_argnames=("driver", "config", "num_slots"))
def _empty_slots(row: Slots, *, driver: _OnMesh, config: DecodeConfig, num_slots: int) -> Slots:
    specs = slot_specs(config)
    repeat = partial(empty_slots, num_slots=num_slots)
    return jax.shard_map(repeat, mesh=driver.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(row)


@partial(jax.jit, static_argnames=("driver", "config"), donate_argnames=("slots",))
def _insert(slots: Slots, rows: Slots, slot: jax.Array, *, driver: _OnMesh, config: DecodeConfig) -> Slots:
    specs, put = slot_specs(config), partial(insert, pad_id=config.pad_id)
    spread = jax.shard_map(put, mesh=driver.mesh, in_specs=(specs, specs, P()), out_specs=specs, check_vma=False)
    return spread(slots, rows, slot)


def _input_specs(inputs: Inputs) -> tuple[Any, ...]:
    return ROWS, ROWS, ROWS, ROWS, None if inputs[-1] is None else pace_specs()
