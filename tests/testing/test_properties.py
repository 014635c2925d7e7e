"""Any prompts, lengths, parameters and keys, in a few shapes; and the decoder under JAX's own alarms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import DecodeConfig, ModelDrafter, Params, decode, sampling_params
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.testing import (
    EachRow,
    HistoryModel,
    Limited,
    ScriptedDrafter,
    TableModel,
    exact,
    fixed_windows,
    history_params,
    limited_params,
    sampled_window,
    script_of,
)
from specjax.testing.compiling import compiled
from specjax.testing.equality import Batch, Decoder, differing, transformer_target
from specjax.testing.laws import Model
from specjax.verify import Block, Rejection

B, NEW, V = 8, 12, 7
SHAPES = [(8, 10, 4, 7), (4, 1, 1, 2), (12, 5, 7, 61)]
"""B, prompt width, K and V. A row in four is of each rule; the first of the four is greedy."""


@functools.cache
def decoders(window: int, size: int) -> tuple[Decoder, Decoder]:
    """With drafts and without."""
    drafter = Limited(ScriptedDrafter(num_tokens=window))
    config = DecodeConfig(target=HistoryModel(vocab_size=size), drafter=drafter, verifier=EachRow())
    return Decoder(config, NEW), Decoder(decode.without_speculation(config), NEW)


def sampling_rows(size: int) -> dict[str, st.SearchStrategy]:
    return {
        "temperature": st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, size + 1),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "max_tokens": st.integers(0, NEW),
        "stop_token_ids": st.lists(st.integers(0, size - 1), max_size=2),
    }


@st.composite
def batches(draw, shape: tuple[int, int, int, int]) -> Batch:
    count, width, window, size = shape

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=count, max_size=count))

    rows = {name: column(values) for name, values in sampling_rows(size).items()}
    rows["temperature"] = [0.0 if row % 4 == 0 else value for row, value in enumerate(rows["temperature"])]
    rows["min_tokens"] = [draw(st.integers(0, most)) for most in rows["max_tokens"]]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    text = jnp.asarray(random.integers(0, size, (count, width + NEW)), jnp.int32)
    draft = Params(target=history_params(draw(st.integers(0, 3))), draft=script_of(text, window))
    return Batch(
        params=limited_params(draft, column(st.integers(0, window))),
        keys=jax.random.split(jax.random.key(draw(st.integers(0, 2**32 - 1))), count),
        prompt=text[:, :width],
        length=jnp.asarray(column(st.integers(0, width)), jnp.int32),
        sampling=sampling_params(count, **rows),
    )


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch(shape, data):
    """The plain text where it is promised; never more than was asked for; and no row minds the order of the rows."""
    batch, (count, _, window, size) = data.draw(batches(shape)), shape
    speculative, plain = decoders(window, size)
    found = speculative.run(batch)
    equal = (np.arange(count) % 4 <= 1) | (np.asarray(batch.sampling.temperature) == 0)
    assert not (differing(found, plain.run(batch)) & equal).any()
    assert_sound(batch, found, size)
    turned = np.roll(np.arange(count), 4)
    assert not differing(speculative.run(batch.rows(turned)), jax.tree.map(lambda x: x[turned], found)).any()


def assert_sound(batch: Batch, found: specjax.Output, size: int) -> None:
    asked, stops = np.asarray(batch.sampling.max_tokens), np.asarray(batch.sampling.stop_token_ids)
    assert (found.length <= np.where(batch.length > 0, asked, 0)).all()
    assert ((found.tokens >= 0) & (found.tokens < size)).all()
    assert (found.tokens[np.arange(NEW) >= found.length[:, None]] == 0).all()
    np.testing.assert_array_equal(found.stats.emitted, found.length)
    assert (found.stats.accepted <= found.stats.drafted).all()
    nothing_left = found.finish_reason == specjax.FinishReason.NAN  # of 2 ids, say, both of which may not come yet
    assert (found.stats.steps <= found.length + nothing_left).all()
    for row, count in enumerate(found.length):
        text = found.tokens[row, :count].tolist()
        stopped = bool(text) and text[-1] in stops[row]
        assert stopped == (found.finish_reason[row] == specjax.FinishReason.STOP)
        assert not set(text[:-1]) & set(stops[row].tolist())
        assert not stopped or count > batch.sampling.min_tokens[row]


# ---- Any laws and windows, exactly ----


def random_model(seed: int, size: int, concentration: float) -> Model:
    """Another law after each text; small concentrations put nearly all mass on one token, and none on some."""

    def law(text: list[int]) -> np.ndarray:
        probs = np.random.default_rng([seed, *text]).dirichlet(np.full(size, concentration))
        return np.where(probs < 1e-9, 0, probs)

    def logits(texts) -> jax.Array:
        laws = [[law(text[:end]) for end in range(len(text) + 1)] for text in np.asarray(texts).tolist()]
        with np.errstate(divide="ignore"):
            return jnp.asarray(np.log(laws))

    return logits


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from([(2, 3), (3, 2)]), st.integers(0, 3), st.integers(0, 999), st.sampled_from([0.02, 0.5, 5.0]))
def test_any_laws_are_kept_exactly(shape, length, seed, concentration):
    size, window = shape
    with jax.enable_x64(True):
        models = random_model(seed, size, concentration), random_model(seed + 1000, size, concentration)
        options = {"vocab_size": size, "num_tokens": window}
        soft = sampled_window(*models, **options, length=min(length, window))
        for rule in (Rejection(), Block()):
            assert exact(rule, soft).error < 1e-12
            assert exact(rule, fixed_windows(models[0], **options)).error < 1e-12
        assert exact(Block(), soft).accepted >= exact(Rejection(), soft).accepted - 1e-12


# ---- JAX's own alarms ----

TABLE = jax.random.normal(jax.random.key(0), (V, V))


MODEL = TableModel(vocab_size=V)


def test_decoding_uses_no_key_twice():
    """A fresh program, traced under the alarm: every rule, sampled drafts, greedy and sampled rows, all transforms."""
    drafter = ModelDrafter(model=MODEL, num_tokens=3, vocab_size=V)
    config = DecodeConfig(target=MODEL, drafter=drafter, verifier=EachRow(), pad_id=3)
    params = Params(target=TABLE, draft=TABLE.at[2, 3].set(-jnp.inf))
    with jax.debug_key_reuse(True):
        found = specjax.generate(params, *rows_of_all_kinds(), config=config, max_new_tokens=NEW)
        assert found.length.tolist() == [NEW] * 6 + [0, NEW]
    assert np.asarray(found.stats.accepted).sum() > 0


def rows_of_all_kinds() -> tuple:
    """Key, prompts, lengths and parameters."""
    sampling = sampling_params(
        B,
        temperature=[0.0, 1.0, 0.7, 1.0, 0.0, 1e-3, 1.0, 1.0],
        top_k=[0, 2, 0, 0, 1, 0, 0, 0],
        top_p=[1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.1, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0],
        frequency_penalty=[0.0, 0.5] * 4,
        max_tokens=NEW,
    )
    prompt, length = jnp.ones((B, 3), jnp.int32), jnp.array([1, 2, 3, 1, 2, 3, 0, 1])
    return jax.random.key(1), prompt, length, sampling


TRANSFORMER, WEIGHTS = transformer_target()
DRAFTERS = {
    "model": (MODEL, ModelDrafter(model=MODEL, num_tokens=3, vocab_size=V), TABLE),
    "transformer": (TRANSFORMER, ModelDrafter(model=TRANSFORMER, num_tokens=3, vocab_size=11), WEIGHTS),
    "early exit": (TRANSFORMER, EarlyExitDrafter(target=TRANSFORMER, exit_layer=1, num_tokens=3), WEIGHTS),
    "ngram": (TRANSFORMER, NGramDrafter(num_tokens=3), WEIGHTS),
}


def floats_of(name: str) -> tuple:
    """What a fresh program computes that is no whole number: laws of tokens and drafts, caches, the drafter's state.

    JAX's alarm looks at what a program returns, and an `Output` without log-probabilities has nothing to be NaN.
    """
    target, drafter, weights = DRAFTERS[name]
    config = DecodeConfig(target=target, drafter=drafter, verifier=EachRow(), pad_id=3, log_probs=True)

    def decoded(params: Params, *data) -> tuple:
        state = decode.prefill(params, *data, config=config, max_new_tokens=NEW)
        state = decode.decode_steps(params, state, data[-1], 2, config=config)
        state, draft = decode.draft_step(params, state, data[-1], config=config)
        return state.stats.drafted, (state.log_probs, draft.log_probs, state.cache, state.draft_state, state.pace)

    return compiled(decoded)(Params(target=weights, draft=weights), *rows_of_all_kinds())


@pytest.mark.parametrize("name", DRAFTERS)
def test_decoding_computes_no_nan(name):
    with jax.debug_nans(True):
        drafted, floats = floats_of(name)
        assert np.asarray(drafted).sum() > 0
    assert np.asarray(floats[0].processed).any()
    assert not has_nan(floats)


def test_a_nan_in_the_law_of_some_rows_would_be_seen(monkeypatch):
    law = decode.law

    def broken(logits, sampling, *rest):
        log_probs, healthy = law(logits, sampling, *rest)
        return jnp.where((sampling.temperature == 0)[:, None, None], log_probs / 0 * 0, log_probs), healthy

    monkeypatch.setattr(decode, "law", broken)
    assert has_nan(floats_of("model")[1])


def has_nan(floats) -> bool:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(floats)]
    assert any(leaf.dtype == np.float32 for leaf in leaves)
    return any(np.isnan(leaf).any() for leaf in leaves)


def test_the_alarms_do_ring():
    """On what a program returns, or nothing would be shown above."""

    def twice(key):
        return jax.random.uniform(key) + jax.random.uniform(key)

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(twice)(jax.random.key(0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(lambda x: x / x)(jnp.zeros(2)).block_until_ready()
