"""SmolLM2-135M-Instruct itself. Skipped where the model is not in the cache, unless SPECJAX_REQUIRE_MODEL is set."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_readme import CHECKPOINT

import specjax
from specjax.io.checkpoint import load_checkpoint
from specjax.io.sources import resolve_model
from specjax.io.tokenizer import load_tokenizer
from specjax.jobs.model import load_model

TEXT = "Repeat after me, three times: the quick brown fox jumps over the lazy dog."


def absent(requirement, directory):
    raise OSError("tests do not download")


@pytest.fixture(scope="module")
def path():
    try:
        return resolve_model("smollm2-135m-instruct", download=absent)
    except ValueError:
        if os.environ.get("SPECJAX_REQUIRE_MODEL"):
            raise
        pytest.skip("SmolLM2 is not in the cache; the README's test command fetches it")


@pytest.fixture(scope="module")
def model(path):
    return load_model(str(path), dtype="float32")


def test_logits_equal_the_numpy_forward(path):
    checkpoint = load_checkpoint(path, dtype=jnp.float32)
    ids = load_tokenizer(path).encode(TEXT)[:12]
    target = specjax.Transformer(checkpoint.config)
    cache = target.init_cache(checkpoint.params, 1, 16)
    tokens, positions = jnp.asarray([ids]), jnp.arange(len(ids))[None]
    got = target.apply(checkpoint.params, tokens, positions, cache)[0].logits[0]
    wanted = reference.forward(jax.tree.map(np.asarray, checkpoint.params), checkpoint.config, ids)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


def test_speculation_keeps_every_token_and_saves_calls(model):
    prompt, length = specjax.pad_prompts([model.tokenizer.apply_chat_template([{"role": "user", "content": TEXT}])])
    config = specjax.DecodeConfig(
        target=model.model,
        drafter=specjax.NGramDrafter(num_tokens=6),
        verifier=specjax.ExactMatch(),
    )
    sampling = specjax.sampling_params(1, max_tokens=32, stop_token_ids=model.eos_ids)
    params, key = specjax.Params(target=model.params), jax.random.key(0)
    run = {"config": config, "max_new_tokens": 32}
    output = specjax.generate(params, key, prompt, length, sampling, **run)
    plain = specjax.autoregressive(params, key, prompt, length, sampling, **run)
    assert output.tokens.tolist() == plain.tokens.tolist()
    assert "quick brown fox" in model.tokenizer.decode(output.tokens[0, : output.length[0]].tolist())
    assert output.stats.steps[0] <= 0.7 * plain.stats.steps[0]


def test_the_readme_completes_a_text(model, monkeypatch, capsys):
    """Its model is fetched by name, which a test must not do; this one is the same."""
    monkeypatch.setattr("specjax.jobs.model.load_model", lambda name, *, dtype: model)
    exec(CHECKPOINT, {})
    assert re.search(r"\b(2|3|5|7|11|13|17|19|23|29|prime)\b", capsys.readouterr().out)
