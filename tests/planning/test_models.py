"""Shipped architectures: the sizes that their makers state."""

import json
import math

import jax
import pytest

from specjax.models.params import is_shape, param_shapes
from specjax.planning.hardware import check_topology
from specjax.planning.models import find_config, public_models

NUM_PARAMS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_every_public_model_has_its_size():
    def count(name):
        shapes = jax.tree.leaves(param_shapes(find_config(name)), is_leaf=is_shape)
        return sum(map(math.prod, shapes))

    assert {name: count(name) for name in public_models()} == NUM_PARAMS


def test_a_config_on_disk(tmp_path):
    config = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_config(str(tmp_path)) == find_config(str(tmp_path / "config.json"))
    assert find_config(str(tmp_path)).num_kv_heads == 4


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"one of llama-3\.1-8b, .*, got 'nothing'"):
        find_config("nothing")
    with pytest.raises(ValueError, match=r"expected a config\.json"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        find_config(str(tmp_path))


def test_topologies():
    assert [check_topology(name)[1] for name in ("v5e:2x4", "v5p:2x2x4", "v6e:1x1")] == [8, 16, 1]
    for name in ("v5e", "v3:2x2", "v5e:0x4", "v5e:2x", "2x4"):
        with pytest.raises(ValueError, match="expected a topology like v5e:2x4"):
            check_topology(name)
