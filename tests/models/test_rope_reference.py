import dataclasses
import math

import harness
import numpy as np
import pytest
import reference
import reference_transformer
from reference_transformer import inverse_frequencies, rope_magnitude

from specjax.models.config import RopeConfig

PLAIN = np.array([1.0, 0.1, 0.01, 0.001])
ONE_TURN = 4 * math.log(64 / (2 * math.pi)) / math.log(10_000)


def rope(scaling, **fields):
    return RopeConfig(theta=10_000.0, scaling=scaling, factor=4.0, original_max_positions=64, **fields)


@pytest.mark.parametrize(
    ("config", "length", "right"),
    [
        (rope("default"), 5, PLAIN),
        (rope("linear"), 5, PLAIN / 4),
        (rope("llama3"), 5, [1, 0.025465, 0.0025, 0.00025]),  # case 53
        (rope("dynamic"), 64, PLAIN),
        # Base 10000 (4 * 128/64 - 3)^(8/6) at length 128.
        (rope("dynamic"), 128, [1, 5 ** (-1 / 3) / 10, 5 ** (-2 / 3) / 100, 5**-1 / 1000]),
        (rope("default", frequency_factors=(1, 2, 4, 5)), 5, [1, 0.05, 0.0025, 0.0002]),
        (rope("yarn", frequency_factors=(1, 1, 1, 1)), 5, PLAIN),
        # One turn in 64 tokens falls at index ONE_TURN = 1.008, 32 turns below 0.
        (rope("yarn"), 5, [1, 0.0625, 0.0025, 0.00025]),
        (rope("yarn", truncate=False), 5, [1, 0.1 * (1 - 0.75 / ONE_TURN), 0.0025, 0.00025]),
        (rope("yarn", beta_slow=0.01), 5, [1, 0.1 * (1 - 0.75 / 4), 0.01 * (1 - 1.5 / 4), 0.001 * (1 - 2.25 / 4)]),
    ],
)
def test_inverse_frequencies(config, length, right):
    np.testing.assert_allclose(inverse_frequencies(config, 8, length), right, rtol=2e-5)


def test_llama3_divisors():
    np.testing.assert_allclose(PLAIN / inverse_frequencies(rope("llama3"), 8, 1), [1, 3.92699, 4, 4], atol=5e-6)


@pytest.mark.parametrize(
    ("config", "right"),
    [
        (rope("llama3"), 1),
        (rope("yarn"), 0.1 * math.log(4) + 1),
        (rope("yarn", attention_factor=1.5), 1.5),
        (rope("yarn", mscale=2.0, mscale_all_dim=0.5), (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        (rope("yarn", frequency_factors=(1, 1, 1, 1)), 1),
        (rope("yarn", mscale=2.0), 0.1 * math.log(4) + 1),
        (dataclasses.replace(rope("yarn"), factor=0.5), 1),
    ],
)
def test_rope_magnitude(config, right):
    assert rope_magnitude(config) == pytest.approx(right, rel=1e-12)


def test_rotation_pairs_the_halves_and_grows_with_the_position():
    heads = np.zeros((3, 1, 8))
    heads[:, 0, [0, 5]] = 1.0  # the first half of pair 0, the second half of pair 1
    turned = reference_transformer.rotate(heads, rope("yarn"))[2, 0] / rope_magnitude(rope("yarn"))
    right = [math.cos(2), -math.sin(0.125), 0, 0, math.sin(2), math.cos(0.125), 0, 0]
    np.testing.assert_allclose(turned, right, atol=1e-12)


def test_dynamic_positions_turn_by_their_own_length():
    """Beyond the original length each position has its own base, so a longer text changes nothing before its end."""
    config = harness.tiny_config(rope=dataclasses.replace(rope("dynamic"), original_max_positions=6))
    plain = harness.tiny_config()
    params, text = harness.tiny_params(), list(range(10))
    logits = reference.forward(params, config, text)
    np.testing.assert_allclose(logits[:8], reference.forward(params, config, text[:8]), atol=1e-12)
    differs = np.abs(logits - reference.forward(params, plain, text)).max(axis=-1) > 1e-6
    assert differs.tolist() == [False] * 6 + [True] * 4


@pytest.mark.parametrize("scaling", ["dynamic", "llama3", "yarn"])
def test_scaling_without_the_original_length_is_refused(scaling):
    with pytest.raises(ValueError, match="original_max_positions"):
        inverse_frequencies(RopeConfig(scaling=scaling, factor=2.0), 8, 1)


def test_window_hides_what_is_further_back():
    """One layer, window 3: token t reaches positions t..t + 2; two layers carry it on to t + 4."""
    text, other = [5, 6, 7, 8, 9, 10, 11, 12], [4, 6, 7, 8, 9, 10, 11, 12]
    for layers, reach in ((1, 3), (2, 5)):
        config = harness.tiny_config(num_layers=layers, sliding_windows=(3,) * layers)
        params = harness.tiny_params(0, config)
        change = reference.forward(params, config, text) - reference.forward(params, config, other)
        assert (np.abs(change).max(axis=-1) > 1e-9).tolist() == [True] * reach + [False] * (8 - reach)


def test_query_heads_share_kv_heads_in_order():
    """Repeating the KV heads (0, 0, 1, 1) gives the same model without grouping."""
    grouped, params = harness.tiny_config(), harness.tiny_params()
    apart = harness.tiny_config(num_kv_heads=4)
    logits = reference.forward(params, grouped, range(9))
    assert_same = np.testing.assert_allclose
    assert_same(reference.forward(_with_kv_heads(params, [0, 0, 1, 1]), apart, range(9)), logits, atol=1e-10)
    assert np.abs(reference.forward(_with_kv_heads(params, [0, 1, 0, 1]), apart, range(9)) - logits).max() > 1e-2


def _with_kv_heads(params, heads):
    def repeat(matrix):
        return np.asarray(matrix).reshape(2, 8, -1)[heads].reshape(32, -1)

    return params | {"layers": [layer | {name: repeat(layer[name]) for name in "kv"} for layer in params["layers"]]}


@pytest.mark.parametrize(
    ("name", "right"),
    [("silu", 0.731058579), ("gelu", 0.841344746), ("gelu_tanh", 0.841191990), ("relu", 1.0)],
)
def test_activations_at_one(name, right):
    layer = {"gate": np.eye(2), "up": np.zeros((2, 2)), "up_bias": np.ones(2), "down": np.eye(2)}
    value = reference_transformer.mlp(layer, harness.tiny_config(activation=name), np.array([[1.0, 0.0]]))
    np.testing.assert_allclose(value, [[right, 0]], atol=1e-9)
