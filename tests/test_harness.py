import harness
import jax
import jax.numpy as jnp
import numpy as np
import reference

from specjax.models.params import param_shapes


def test_tiny_params_fit_the_config_and_differ_by_seed():
    config = harness.tiny_config()
    shapes = jax.tree.map(lambda leaf: leaf.shape, harness.tiny_params())
    assert shapes == param_shapes(config)
    assert not np.array_equal(harness.tiny_params(0)["embed"], harness.tiny_params(1)["embed"])
    assert np.ptp(harness.tiny_params()["norm"]) > 0.5
    assert harness.tiny_params(dtype=jnp.bfloat16)["norm"].dtype == jnp.bfloat16


def test_tiny_model_has_clear_preferences():
    logits = reference.forward(harness.tiny_params(), harness.tiny_config(), range(30))
    top = np.sort(logits, axis=-1)[:, -2:]
    assert np.median(top[:, 1] - top[:, 0]) > 0.1
    assert len(set(logits.argmax(axis=-1).tolist())) > 10


def test_state_dict_of_a_tied_model_with_biases():
    config = harness.tiny_config(
        tied_embeddings=True, attention_bias=True, attention_output_bias=True, mlp_bias=True, num_layers=1
    )
    params = harness.tiny_params(0, config, dtype=jnp.bfloat16)
    tensors = harness.to_huggingface_state_dict(params)
    layer = "model.layers.0."
    norms = ["input_layernorm", "post_attention_layernorm"]
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert set(tensors) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"{layer}{name}.weight" for name in norms + projections),
        *(f"{layer}{name}.bias" for name in projections),
    }
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        tensors[f"{layer}mlp.down_proj.bias"], np.asarray(params["layers"][0]["down_bias"]).astype(np.float32)
    )
