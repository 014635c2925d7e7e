"""The weights of a transformer: one declaration gives every tensor's place and shape."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.config import TransformerConfig


def param_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The param pytree with a shape tuple at each leaf. Matrices are `[out, in]`, as checkpoints store them.

    Layers stay apart (a tuple, not a stacked array), so that one layer's weight is one buffer. A tied model has no
    "unembed": the embedding, already `[V, E]`, serves both ends.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query, value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "attention_norm": (hidden,),
        "q": (query, hidden),
        "k": (value, hidden),
        "v": (value, hidden),
        "o": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    biased = ("q", "k", "v") * config.attention_bias + ("o",) * config.attention_output_bias
    biased += ("gate", "up", "down") * config.mlp_bias
    layer |= {f"{name}_bias": layer[name][:1] for name in biased}
    shapes = {
        "embed": (config.vocab_size, hidden),
        "layers": tuple(dict(layer) for _ in range(config.num_layers)),
        "norm": (hidden,),
    }
    return shapes if config.tied_embeddings else shapes | {"unembed": (config.vocab_size, hidden)}


JOINED = ("q", "k", "v"), ("gate", "up")
"""Projections that read the same input."""


def join_projections(params: Any) -> Any:
    """Lays out each layer's `JOINED` projections as one matrix ("q_k_v", "gate_up"), to be multiplied at once.

    Fewer and larger products are faster (those of one float32 row of SmolLM2-135M on 2 cores by an eighth). The parts
    are deleted layer by layer, so that memory never holds more than one layer twice.

    Args:
      params: a transformer's param pytree as loaded; its joined leaves must not be used afterwards.
    """
    return {**params, "layers": tuple(map(_join_layer, params["layers"]))}


def _join_layer(layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
    layer = dict(layer)
    for names, suffix in itertools.product(JOINED, ("", "_bias")):
        parts = [layer.pop(name + suffix) for name in names if name + suffix in layer]
        if parts:
            layer["_".join(names) + suffix] = jax.block_until_ready(jnp.concatenate(parts))
        for part in parts:
            part.delete()
    return layer


def is_shape(node: Any) -> bool:
    """Whether a node of `param_shapes` is a leaf: a tuple of sizes rather than the tuple of layers."""
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def init_params(
    key: jax.Array, config: TransformerConfig, *, dtype: jnp.dtype = jnp.float32, scale: float = 0.02
) -> Any:
    """Random weights (normal with standard deviation `scale`; norms 1), for tests and for training from scratch.

    Args:
      key: typed PRNG key, consumed.
      config: the architecture.
      dtype: of every leaf.
      scale: standard deviation of matrices and biases.
    """
    paths, treedef = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    keys = jax.random.split(key, len(paths))

    def init(key: jax.Array, path: Any, shape: tuple[int, ...]) -> jax.Array:
        if path[-1].key.endswith("norm"):
            return jnp.ones(shape, dtype)
        return (jax.random.normal(key, shape) * scale).astype(dtype)

    return jax.tree.unflatten(treedef, [init(key, path, shape) for key, (path, shape) in zip(keys, paths, strict=True)])
