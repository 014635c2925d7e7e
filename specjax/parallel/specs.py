"""Where everything lies on a mesh: one `PartitionSpec` for each array, from its name."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.compiled import model_axes
from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.io.weights import Cut
from specjax.models.params import is_shape, param_shapes
from specjax.models.transformer import Transformer
from specjax.parallel.layout import cuts, sources
from specjax.parallel.mesh import DATA, MODEL
from specjax.slots import Slots
from specjax.types import DecodeState, KVCache, LanguageModel, Pace, Params

ROWS: Any = P(DATA)
"""Of whatever has one entry for each row of the batch in front."""
WHOLE: Any = P()
"""Of what every device has whole."""


def on_mesh(config: DecodeConfig, *, target: str | None = MODEL, draft: str | None = None) -> DecodeConfig:
    """The same decoder with its models cut over mesh axes.

    Args:
      config: what to run.
      target: axis of the target (and of an early exit, which is part of it); None: whole on each device.
      draft: axis of a draft model.

    Raises:
      ValueError: a model that cannot be cut.
    """
    drafter = config.drafter
    if isinstance(drafter, EarlyExitDrafter):
        drafter = dataclasses.replace(drafter, target=_over(drafter.target, target))
    if isinstance(drafter, ModelDrafter):
        drafter = dataclasses.replace(drafter, model=_over(drafter.model, draft), axis=target)
    return dataclasses.replace(config, target=_over(config.target, target), drafter=drafter)


def check_cut(config: DecodeConfig, mesh: Mesh) -> None:
    """Refuses a decoder of which nothing is cut over a mesh that has a model axis: its devices would repeat each other.

    Raises:
      ValueError: says how to cut it.
    """
    if mesh.shape.get(MODEL, 1) > 1 and not model_axes(config):
        raise ValueError(
            f"expected a model that is cut over the mesh's {MODEL!r} axis of {mesh.shape[MODEL]} devices, got whole "
            f"ones: pass on_mesh(config) (specjax.parallel.specs), or make the mesh with {MODEL}=1"
        )


def param_specs(config: DecodeConfig) -> Params:
    """A spec for each array of the params, as `shard_params` places them (a prefix tree)."""
    drafter = config.drafter
    draft = _model_specs(drafter.model) if isinstance(drafter, ModelDrafter) else WHOLE
    return Params(target=_model_specs(config.target), draft=draft)


def state_specs(config: DecodeConfig) -> DecodeState:
    """A spec for each array of the decoding loop's carry (a prefix tree)."""
    drafter = config.drafter
    return DecodeState(
        context=ROWS,
        limit=ROWS,
        finish_reason=ROWS,
        keys=ROWS,
        cache=_cache_specs(config.target),
        draft_state=_cache_specs(drafter.model) if isinstance(drafter, ModelDrafter) else ROWS,
        pace=pace_specs(),
        stats=ROWS,
        log_probs=ROWS,
    )


def slot_specs(config: DecodeConfig) -> Slots:
    """A spec for each array of a batch that never ends (a prefix tree)."""
    return Slots(state=state_specs(config), sampling=ROWS)


def pace_specs() -> Pace:
    """A spec for each array of a pace: every row has a history, and all have the same costs."""
    return Pace(acceptance=ROWS, costs=WHOLE)


def shard_params(params: Params, config: DecodeConfig, mesh: Mesh) -> Params:
    """Places params on a mesh, each array padded or repeated so that it divides (see `layout`).

    Args:
      params: whole, as they were loaded: joined projections would be cut across their parts.
      config: says which model is cut over which axis.
      mesh: from `make_mesh`.

    Raises:
      ValueError: params of another layout or mesh, a mesh without the model's axis, or no model that is cut over it.
    """
    check_cut(config, mesh)
    drafter = config.drafter
    if isinstance(drafter, ModelDrafter):
        draft = _placed(params.draft, drafter.model, mesh)
    else:
        draft = place(params.draft, WHOLE, mesh)
    return Params(target=_placed(params.target, config.target, mesh), draft=draft)


def param_cuts(model: Transformer, mesh: Mesh) -> Any:
    """How each tensor of a model goes onto a mesh, for `io.checkpoint.load_checkpoint` and for `shard_params`.

    Raises:
      ValueError: the mesh has no such axis.
    """
    if model.axis is not None and model.axis not in mesh.shape:
        raise ValueError(f"expected a model over an axis of the mesh {dict(mesh.shape)}, got {model.axis!r}")
    lines = sources(model.config, 1 if model.axis is None else mesh.shape[model.axis])

    def cut(path: Any, shape: tuple[int, ...], spec: P) -> Cut:
        kinds = cuts(path[-1].key, len(shape))
        return Cut(NamedSharding(mesh, spec), tuple(None if kind is None else lines[kind] for kind in kinds))

    return jax.tree.map_with_path(cut, param_shapes(model.config), _model_specs(model), is_leaf=is_shape)


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts a pytree on a mesh by a prefix tree of specs. Every process passes the same values."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, spec)), part), specs, tree
    )


def _put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _over(model: LanguageModel, axis: str | None) -> LanguageModel:
    if isinstance(model, Transformer):
        return dataclasses.replace(model, axis=axis)
    if axis is None:
        return model
    raise ValueError(f"expected a Transformer to cut over the axis {axis!r}, got {type(model).__name__}")


def _model_specs(model: LanguageModel) -> Any:
    if not isinstance(model, Transformer):
        return WHOLE

    def spec(path: Any, shape: tuple[int, ...]) -> P:
        return P(*(model.axis if kind else None for kind in cuts(path[-1].key, len(shape))))

    return jax.tree.map_with_path(spec, param_shapes(model.config), is_leaf=is_shape)


def _cache_specs(model: LanguageModel) -> Any:
    if not isinstance(model, Transformer):
        return ROWS
    heads: Any = P(DATA, model.axis)
    return KVCache(keys=heads, values=heads, length=ROWS)


def _placed(params: Any, model: LanguageModel, mesh: Mesh) -> Any:
    """Params on the mesh; what lies there as it should is left alone."""
    if not isinstance(model, Transformer):
        return place(params, WHOLE, mesh)

    def put(shape: tuple[int, ...], leaf: jax.Array, cut: Cut) -> jax.Array:
        there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(cut.sharding, leaf.ndim)
        if there and leaf.shape == cut.shape(shape):
            return leaf
        if leaf.shape != shape:
            raise ValueError(f"expected whole params, {list(shape)}, got {list(leaf.shape)} (of another mesh?)")
        return cut.place(leaf)

    shapes, cuts = param_shapes(model.config), param_cuts(model, mesh)
    if jax.tree.structure(params) != jax.tree.structure(cuts):
        raise ValueError("expected params laid out like param_shapes, got others: place first, join_projections never")
    return jax.tree.map(put, shapes, params, cuts, is_leaf=is_shape)
