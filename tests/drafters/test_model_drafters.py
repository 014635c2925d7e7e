"""Drafters with a law of their own, at the edges; tests/test_decode.py plays them step by step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from decoding import fast_jit, prefill
from harness import tiny_config, tiny_params

from specjax import (
    DecodeConfig,
    EarlyExitDrafter,
    ModelDrafter,
    Params,
    Transformer,
    decode,
    make_pace,
    sampling_params,
)

CONFIG = tiny_config(num_layers=1)
TARGET = Transformer(CONFIG)
K = 3
step = fast_jit(decode.decode_step, static_argnames=("config",))


def inputs(costs):
    params = Params(target=tiny_params(0, CONFIG), draft=tiny_params(1, CONFIG))
    prompt, length = jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]]), jnp.array([4, 2])
    return params, jax.random.key(0), prompt, length, sampling_params(2, max_tokens=8), make_pace(2, costs)


def test_early_exit_refuses_the_cache_of_another_target():
    other = Transformer(dataclasses.replace(CONFIG, num_layers=2))
    config = DecodeConfig(target=TARGET, drafter=EarlyExitDrafter(target=other, exit_layer=1, num_tokens=K))
    params, *rows = inputs([1.0, 1.0])
    state = jax.eval_shape(partial(decode.prefill, config=config, max_new_tokens=8), params, *rows)
    with pytest.raises(ValueError, match="same target"):
        jax.eval_shape(partial(decode.decode_step, config=config), params, state, rows[-2])


@pytest.mark.parametrize(("cost", "written"), [(1.0, K), (100.0, 1)])
def test_nothing_is_drafted_when_no_row_can_gain(cost, written):
    """Drafting writes the draft cache as far as its window reaches; without it only the pending token is fed."""
    config = DecodeConfig(target=TARGET, drafter=ModelDrafter(model=TARGET, num_tokens=K, vocab_size=61))
    params, *rows = inputs([1.0, cost])
    state = prefill(params, *rows, config=config, max_new_tokens=8)
    after = step(params, state, rows[-2], config=config)
    changed = (after.draft_state.keys[0] != state.draft_state.keys[0]).any(axis=(1, 3))
    assert changed.sum(axis=1).tolist() == [written, written]
    assert (after.stats.drafted > 0).tolist() == [written == K] * 2
