"""The decoder inside programs that have 64-bit numbers enabled: it stays in 32 bits, and writes the same tokens."""

import re

import jax
import numpy as np
import pytest
from harness import tiny_config, tiny_params

import specjax
from specjax import decode

pytestmark = pytest.mark.usefixtures("quickly")

TARGET = specjax.Transformer(tiny_config())
DRAFTERS = {
    "none": specjax.NoDrafter(),
    "ngram": specjax.NGramDrafter(num_tokens=3),
    "model": specjax.ModelDrafter(model=TARGET, num_tokens=3, vocab_size=TARGET.vocab_size),
    "early exit": specjax.EarlyExitDrafter(target=TARGET, exit_layer=1, num_tokens=3),
}
RULES = {"rejection": specjax.Rejection(), "block": specjax.Block(), "exact_match": specjax.ExactMatch()}


def decoder(drafter, rule):
    return specjax.DecodeConfig(target=TARGET, drafter=DRAFTERS[drafter], verifier=RULES[rule], log_probs=True)


def arguments(paced):
    params = specjax.Params(target=tiny_params(), draft=tiny_params(1))
    prompt, length = specjax.pad_prompts([[1, 2, 3, 1, 2], [7, 7, 7], [4]])
    sampling = specjax.sampling_params(
        3,
        temperature=[0.0, 0.8, 1.5],
        top_k=[0, 9, 0],
        top_p=[1.0, 0.9, 1.0],
        min_p=[0, 0, 0.1],
        repetition_penalty=[1, 1.2, 1],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        min_tokens=2,
        max_tokens=[8, 12, 12],
        stop_token_ids=[0, 5],
        logit_bias=np.linspace(-1, 1, TARGET.vocab_size),
    )
    return params, jax.random.key(3), prompt, length, sampling, specjax.make_pace(3, [1.0, 1.5]) if paced else None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_array_of_64_bit_floats_in_the_program(drafter, rule):
    with jax.enable_x64(True):
        program, output = jax.make_jaxpr(
            lambda *values: decode.generate(*values, config=decoder(drafter, rule), max_new_tokens=12),
            return_shape=True,
        )(*arguments(paced=drafter != "none"))
    assert not re.search(r"f64\[[^\]]", str(program))
    assert all(leaf.dtype.itemsize == 4 for leaf in jax.tree.leaves(output))


def test_same_outputs_with_64_bit_numbers_enabled():
    config = decoder("model", "rejection")

    def run():
        *_, last = specjax.stream(*arguments(paced=True), config=config, max_new_tokens=12)
        return last

    wanted = run()
    with jax.enable_x64(True):
        jax.tree.map(np.testing.assert_array_equal, run(), wanted)
