"""The Llama family as pure functions over a param pytree (`params.param_shapes` gives its layout).

Inside a map over a mesh axis each device holds its part of every matrix (`specjax.parallel.layout` cuts them): heads,
inner columns and vocabulary are whatever the local arrays have, and a layer's two outputs are summed over the axis.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cache as kv
from specjax.models.attention import attend
from specjax.models.config import TransformerConfig
from specjax.models.params import param_shapes
from specjax.models.rope import rotate, rotations
from specjax.types import KVCache, ModelOutput

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A `LanguageModel`. Matrices keep the dtype of their params; sums, norms and logits are float32."""

    config: TransformerConfig
    taps: tuple[int, ...] = ()
    """Hidden states to return as `ModelOutput.features`: tap i is what enters layer i, tap `num_layers` leaves the
    last layer, before the final norm."""
    axis: str | None = None
    """Mesh axis that the params are cut over; None: they are whole. Each device has its part of the logits then."""

    def __post_init__(self) -> None:
        wrong = [tap for tap in self.taps if not 0 <= tap <= self.config.num_layers]
        if wrong:
            raise ValueError(f"expected taps between 0 and num_layers = {self.config.num_layers}, got {wrong}")

    @property
    def vocab_size(self) -> int:
        """Width V of the logits."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text the model was made for, in tokens."""
        return self.config.max_positions

    def init_cache(self, params: Any, batch_size: int, capacity: int) -> KVCache:
        """An empty cache in the dtype of the weights, for the KV heads that they have."""
        config = self.config
        weight = params["layers"][0].get("k")
        heads = config.num_kv_heads if weight is None else weight.shape[0] // config.head_dim
        dtype = params["embed"].dtype
        return kv.init_cache(batch_size, capacity, heads, config.head_dim, config.num_layers, dtype)

    def apply(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: KVCache
    ) -> tuple[ModelOutput, KVCache]:
        """One forward pass over T tokens a row. See `LanguageModel.apply`."""
        hidden, entries = self.hidden_states(params, tokens, positions, cache)
        features = tuple(hidden[tap] for tap in self.taps) or None
        output = dataclasses.replace(self.unembed(params, hidden[-1]), features=features)
        return output, kv.append(cache, entries, positions, hidden[-1])

    def hidden_states(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: KVCache, *, num_layers: int | None = None
    ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
        """Runs the first `num_layers` layers (default: all) without writing to the cache.

        Returns:
          The hidden state `[B, T, E]` float32 entering each layer and leaving the last one, and each layer's new keys
          and values `[B, heads, T, D]`.
        """
        config = self.config
        windows = config.sliding_windows or (None,) * config.num_layers
        turns = rotations(config.rope, config.head_dim, positions)
        hidden, entries = [self.embed(params, tokens)], []
        for index, layer in enumerate(params["layers"][:num_layers]):
            cached = cache.keys[index], cache.values[index]
            state, new = _layer(layer, hidden[-1], turns, cached, positions, config, windows[index], self.axis)
            hidden.append(state)
            entries.append(new)
        return hidden, entries

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Ids `[B, T]` -> `[B, T, E]` float32; each device looks up what its part of the vocabulary holds."""
        table = params["embed"]
        if self.axis is None:
            return _look_up(table, tokens)
        local = tokens - lax.axis_index(self.axis) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        found = _look_up(table, jnp.where(mine, local, 0))
        return lax.psum(jnp.where(mine[..., None], found, 0), self.axis)

    def unembed(self, params: Any, hidden: jax.Array) -> ModelOutput:
        """Final norm and head of `[B, T, E]`: the logits of all ids, or of a device's part of the vocabulary."""
        logits = linear(norm(hidden, params["norm"], self.config), params.get("unembed", params["embed"]))
        if self.axis is None:
            return ModelOutput(logits=logits[..., : self.vocab_size])  # `Jit` has padded params and no axis
        return ModelOutput(logits=logits, axis=self.axis, vocab_size=self.vocab_size)


def _run_layer(
    layer: Any,
    x: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    config: TransformerConfig,
    window: int | None,
    axis: str | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    normed = norm(x, layer["attention_norm"], config)
    query, keys, values = (_heads(part, config) for part in _projections(layer, ("q", "k", "v"), normed, config))
    query, keys = rotate(query, *turns), rotate(keys, *turns)
    new = keys.swapaxes(1, 2).astype(layer["o"].dtype), values.swapaxes(1, 2).astype(layer["o"].dtype)
    x = x + _project(layer, "o", attend(query, new, cached, positions, window=window), axis)
    gate, up = _projections(layer, ("gate", "up"), norm(x, layer["mlp_norm"], config), config)
    return x + _project(layer, "down", _ACTIVATIONS[config.activation](gate) * up, axis), new


_layer = jax.jit(_run_layer, static_argnums=(5, 6, 7))
"""Jitted so that equal layers are traced once and lowered to one function; XLA inlines it."""


def norm(x: jax.Array, weight: jax.Array, config: TransformerConfig) -> jax.Array:
    """RMSNorm (arXiv 1910.07467) in float32."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_epsilon) * weight.astype(jnp.float32)


def _look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table, float32. The barrier keeps XLA:CPU from widening the whole table ahead of a loop."""
    table, ids = lax.optimization_barrier((table, ids))
    return table[ids].astype(jnp.float32)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`[..., in]` times `[out, in]` -> `[..., out]` float32."""
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    out = lax.platform_dependent(rows, weight, cpu=_multiply_on_cpu, default=_multiply)
    return out.reshape(*x.shape[:-1], -1)


def _multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _multiply_on_cpu(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """The same, in the forms that XLA:CPU has fast kernels for; ARCHITECTURE.md has the measurements.

    The barriers keep XLA from turning each form back into the slow one.
    """
    count, small, narrow = rows.shape[0], weight.dtype == jnp.bfloat16, weight.shape[0] < 2**14
    if count == 1 and small:
        rows = jnp.concatenate([rows, rows])
    rows = lax.optimization_barrier(rows)
    if 1 < len(rows) <= 16 and (small or narrow):
        return lax.optimization_barrier(_multiply(weight, rows)).T[:count]
    return _multiply(rows, weight)


def _project(layer: Any, name: str, x: jax.Array, axis: str | None = None) -> jax.Array:
    """A matrix and its bias; summed over `axis`, each device having part of the columns."""
    out = linear(x, layer[name])
    out = out if axis is None else lax.psum(out, axis)
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + bias.astype(jnp.float32)


def _projections(layer: Any, names: tuple[str, ...], x: jax.Array, config: TransformerConfig) -> list[jax.Array]:
    """The named projections of x, from one product where `join_projections` has laid them out as one."""
    joined = "_".join(names)
    if joined not in layer:
        return [_project(layer, name, x) for name in names]
    widths = param_shapes(config)["layers"][0]
    ends = np.cumsum([widths[name][0] for name in names])
    return jnp.split(_project(layer, joined, x), ends[:-1], axis=-1)


def _heads(x: jax.Array, config: TransformerConfig) -> jax.Array:
    """`[B, T, heads * D]` -> `[B, T, heads, D]`."""
    return x.reshape(*x.shape[:2], -1, config.head_dim)
