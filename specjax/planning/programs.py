"""The decoder's programs for devices that are not there: the drivers' own maps, lowered from shapes alone."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.drafters.model import ModelDrafter
from specjax.models.params import is_shape, param_shapes
from specjax.models.transformer import Transformer
from specjax.parallel.mesh import DATA
from specjax.parallel.pmapped import program
from specjax.parallel.sharded import ShardMap
from specjax.parallel.specs import ROWS, WHOLE, param_cuts, param_specs, state_specs
from specjax.sampling import sampling_params
from specjax.types import Params

MAPS = ("shard_map", "pmap")
"""Drivers that programs are compiled for."""
_LIMITS = (jax.ShapeDtypeStruct((), jnp.int32),) * 2
"""How many steps, and how many rows have to run: the last arguments of `decode_steps`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What a program is made for."""

    config: DecodeConfig
    """From `on_mesh`, its drafter a `ModelDrafter` or none."""
    dtype: Any
    batch_size: int
    """Rows on all devices together."""
    prompt_width: int
    max_new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
    """Programs before they are compiled, and the shapes that they work on."""

    prefill: Any
    steps: Any
    """`decode_steps`, its state donated."""
    params: Params
    """Of one device."""
    state: Any
    """`DecodeState` of one device."""

    @property
    def capacity(self) -> int:
        """Slots of the caches."""
        return self.state.cache.keys[0].shape[2]


def lower(workload: Workload, mesh: Mesh, parallel: str) -> Lowered:
    """The programs of a driver, one of `MAPS`.

    Raises:
      ValueError: a batch that is no multiple of the data axis, or more than one transformer as drafter.
    """
    if workload.batch_size % mesh.shape[DATA]:
        raise ValueError(f"expected batches that are multiples of data={mesh.shape[DATA]}, got {workload.batch_size}")
    return {"shard_map": _shard_map, "pmap": _pmap}[parallel](workload, mesh)


def _shard_map(workload: Workload, mesh: Mesh) -> Lowered:
    driver, config = ShardMap(mesh), workload.config
    params = _params(workload, mesh)
    inputs = _on(mesh, ROWS, _inputs(workload.batch_size, workload.prompt_width))
    specs, states = param_specs(config), state_specs(config)
    read = partial(decode.prefill, max_new_tokens=workload.max_new_tokens)
    prefill = jax.jit(driver.spread(read, config, (specs, ROWS, ROWS, ROWS, ROWS), states))
    state = _on(mesh, states, jax.eval_shape(prefill, params, *inputs))
    run = partial(decode.decode_steps, row_axis=driver.row_axis)
    steps = driver.spread(run, config, (specs, states, ROWS, WHOLE, WHOLE), states)
    arguments = params, state, inputs[-1], *_on(mesh, WHOLE, _LIMITS)
    return Lowered(
        prefill=prefill.lower(params, *inputs),
        steps=jax.jit(steps, donate_argnums=1).lower(*arguments),
        params=_local(params),
        state=_local(state),
    )


def _pmap(workload: Workload, mesh: Mesh) -> Lowered:
    """The program of one group of the data axis: the others have the same."""
    config, devices = workload.config, tuple(mesh.devices[0])
    group = Mesh(mesh.devices[:1], mesh.axis_names)
    stack = partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct((len(devices), *leaf.shape), leaf.dtype))
    params = _local(_params(workload, group))
    inputs = stack(_inputs(workload.batch_size // mesh.shape[DATA], workload.prompt_width))
    prefill = program(decode.prefill, devices, (), config=config, max_new_tokens=workload.max_new_tokens)
    state = jax.eval_shape(prefill, stack(params), *inputs)
    steps = program(decode.decode_steps, devices, (1,), config=config)
    return Lowered(
        prefill=prefill.lower(stack(params), *inputs),
        steps=steps.lower(stack(params), state, inputs[-1], *stack(_LIMITS)),
        params=params,
        state=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state),
    )


def _params(workload: Workload, mesh: Mesh) -> Params:
    """The weights on the mesh, as a driver places them."""
    drafter = workload.config.drafter
    draft = drafter.model if isinstance(drafter, ModelDrafter) else None
    models = workload.config.target, draft
    target, draft = (None if model is None else _weights(model, workload.dtype, mesh) for model in models)
    return Params(target=target, draft=draft)


def _weights(model: Any, dtype: Any, mesh: Mesh) -> Any:
    if not isinstance(model, Transformer):
        raise ValueError(f"expected a Transformer, got {type(model).__name__}")

    def leaf(shape: tuple[int, ...], cut: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(cut.shape(shape), dtype, sharding=cut.sharding)

    return jax.tree.map(leaf, param_shapes(model.config), param_cuts(model, mesh), is_leaf=is_shape)


def _inputs(batch: int, width: int) -> Any:
    """Keys, prompts, lengths and sampling parameters, as shapes."""
    keys = jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.arange(batch)))
    prompt, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, width), (batch,)))
    sampling = sampling_params(batch, max_tokens=1, stop_token_ids=[0])
    return keys, prompt, length, jax.eval_shape(lambda: sampling)


def _on(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """Shapes with their place on the mesh, by a prefix tree of specs."""

    def put(spec: P, part: Any) -> Any:
        where = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), part)

    return jax.tree.map(put, specs, tree)


def _local(tree: Any) -> Any:
    """The shapes on one device."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), tree)
