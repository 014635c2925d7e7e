"""SmolLM2-135M-Instruct itself. Skipped where the model is not in the cache, unless SPECJAX_REQUIRE_MODEL is set."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import specjax
from specjax.io.checkpoint import load_checkpoint
from specjax.io.sources import resolve_model
from specjax.io.tokenizer import load_tokenizer

TEXT = "Repeat after me, three times: the quick brown fox jumps over the lazy dog."


def absent(requirement, directory):
    raise OSError("tests do not download")


@pytest.fixture(scope="module")
def model():
    try:
        path = resolve_model("smollm2-135m-instruct", download=absent)
    except ValueError:
        if os.environ.get("SPECJAX_REQUIRE_MODEL"):
            raise
        pytest.skip("SmolLM2 is not in the cache; the README's test command fetches it")
    return load_checkpoint(path, dtype=jnp.float32), load_tokenizer(path)


def test_logits_equal_the_numpy_forward(model):
    checkpoint, tokenizer = model
    ids = tokenizer.encode(TEXT)[:12]
    target = specjax.Transformer(checkpoint.config)
    cache = target.init_cache(checkpoint.params, 1, 16)
    tokens, positions = jnp.asarray([ids]), jnp.arange(len(ids))[None]
    got = target.apply(checkpoint.params, tokens, positions, cache)[0].logits[0]
    wanted = reference.forward(jax.tree.map(np.asarray, checkpoint.params), checkpoint.config, ids)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


def test_speculation_keeps_every_token_and_saves_calls(model):
    checkpoint, tokenizer = model
    prompt, length = specjax.pad_prompts([tokenizer.apply_chat_template([{"role": "user", "content": TEXT}])])
    config = specjax.DecodeConfig(
        target=specjax.Transformer(checkpoint.config),
        drafter=specjax.NGramDrafter(num_tokens=6),
        verifier=specjax.ExactMatch(),
    )
    sampling = specjax.sampling_params(1, max_tokens=32, stop_token_ids=checkpoint.eos_ids)
    params, key = specjax.Params(target=checkpoint.params), jax.random.key(0)
    run = {"config": config, "max_new_tokens": 32}
    output = specjax.generate(params, key, prompt, length, sampling, **run)
    plain = specjax.autoregressive(params, key, prompt, length, sampling, **run)
    assert output.tokens.tolist() == plain.tokens.tolist()
    assert "quick brown fox" in tokenizer.decode(output.tokens[0, : output.length[0]].tolist())
    assert output.stats.steps[0] <= 0.7 * plain.stats.steps[0]
