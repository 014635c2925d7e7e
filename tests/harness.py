"""A tiny transformer and the way to Hugging Face, beside the models and drafters of `specjax.testing`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import TransformerConfig
from specjax.models.params import param_shapes
from specjax.testing.models import ContraryDrafter as ContraryDrafter
from specjax.testing.models import HistoryModel as HistoryModel
from specjax.testing.models import OracleDrafter as OracleDrafter
from specjax.testing.models import Script as Script
from specjax.testing.models import ScriptedDrafter as ScriptedDrafter
from specjax.testing.models import SelfDrafter as SelfDrafter
from specjax.testing.models import TableDrafter as TableDrafter
from specjax.testing.models import TableModel as TableModel
from specjax.testing.models import history_params as history_params
from specjax.testing.models import script_of as script_of


def tiny_config(**changes: Any) -> TransformerConfig:
    """Two layers, four query heads on two KV heads, 61 tokens; `changes` replace fields."""
    config = TransformerConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
    )
    return dataclasses.replace(config, **changes)


def tiny_params(seed: int = 0, config: TransformerConfig | None = None, *, dtype: jnp.dtype = jnp.float32) -> Any:
    """Random weights large enough for clear preferences, with uneven norms, for `tiny_config()` or another one.

    They are drawn by NumPy: nothing is compiled.
    """
    rng = np.random.default_rng(seed)

    def draw(path: Any, shape: tuple[int, ...]) -> jax.Array:
        values = rng.uniform(0.5, 1.5, shape) if path[-1].key.endswith("norm") else 0.3 * rng.normal(size=shape)
        return jnp.asarray(values.astype(dtype))

    shapes = param_shapes(config or tiny_config())
    return jax.tree.map_with_path(draw, shapes, is_leaf=lambda node: type(node) is tuple and type(node[0]) is int)


_HUGGINGFACE_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def to_huggingface_state_dict(params: Any) -> dict[str, np.ndarray]:
    """The float32 state dict of the equivalent `LlamaForCausalLM` (or Mistral, Qwen2); tied models have no head."""
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if "unembed" in params:
        tensors["lm_head.weight"] = params["unembed"]
    for index, layer in enumerate(params["layers"]):
        for name, tensor in layer.items():
            place = f"model.layers.{index}.{_HUGGINGFACE_NAMES[name.removesuffix('_bias')]}"
            tensors[f"{place}.{'bias' if name.endswith('_bias') else 'weight'}"] = tensor
    return {name: np.asarray(tensor).astype(np.float32) for name, tensor in tensors.items()}
