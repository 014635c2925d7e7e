"""Any prompts, lengths, parameters and keys, through one compiled program; and the decoder under JAX's own alarms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import DecodeConfig, ModelDrafter, Params, decode, sampling_params
from specjax.testing import (
    EachRow,
    HistoryModel,
    Limited,
    ScriptedDrafter,
    TableDrafter,
    TableModel,
    exact,
    fixed_windows,
    history_params,
    limited_params,
    sampled_window,
    script_of,
)
from specjax.testing.equality import Batch, Decoder, differing
from specjax.testing.laws import Model
from specjax.verify import Block, Rejection

B, WIDTH, NEW, K, V = 8, 10, 12, 4, 7
"""Two rows of each rule; the first of the four is greedy."""
TARGET = HistoryModel(vocab_size=V)
CONFIG = DecodeConfig(target=TARGET, drafter=Limited(ScriptedDrafter(num_tokens=K)), verifier=EachRow())
DECODER = Decoder(CONFIG, NEW)
PLAIN = Decoder(decode.without_speculation(CONFIG), NEW)
RULE = np.arange(B) % 4


def column(values, **options):
    return st.lists(values, min_size=B, max_size=B, **options)


ROWS = st.fixed_dictionaries(
    {
        "temperature": column(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0])),
        "top_k": column(st.integers(0, V + 1)),
        "top_p": column(st.sampled_from([0.01, 0.5, 0.9, 1.0])),
        "min_p": column(st.sampled_from([0.0, 0.1, 1.0])),
        "repetition_penalty": column(st.sampled_from([0.5, 1.0, 2.0])),
        "presence_penalty": column(st.sampled_from([-1.0, 0.0, 1.0])),
        "frequency_penalty": column(st.sampled_from([0.0, 0.7])),
        "max_tokens": column(st.integers(0, NEW)),
        "stop_token_ids": column(st.lists(st.integers(0, V - 1), max_size=2)),
    }
)


@st.composite
def batches(draw) -> Batch:
    rows = draw(ROWS)
    rows["temperature"] = [0.0 if rule == 0 else t for rule, t in zip(RULE, rows["temperature"], strict=True)]
    rows["min_tokens"] = [draw(st.integers(0, most)) for most in rows["max_tokens"]]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    text = jnp.asarray(random.integers(0, V, (B, WIDTH + NEW)), jnp.int32)
    draft = Params(target=history_params(draw(st.integers(0, 3))), draft=script_of(text, K))
    return Batch(
        params=limited_params(draft, draw(column(st.integers(0, K)))),
        keys=jax.random.split(jax.random.key(draw(st.integers(0, 2**32 - 1))), B),
        prompt=text[:, :WIDTH],
        length=jnp.asarray(draw(column(st.integers(0, WIDTH))), jnp.int32),
        sampling=sampling_params(B, **rows),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches())
def test_any_batch(batch):
    """The plain text where it is promised; never more than was asked for; and no row minds the order of the rows."""
    found, plain = DECODER.run(batch), PLAIN.run(batch)
    equal = (RULE <= 1) | (np.asarray(batch.sampling.temperature) == 0)
    assert not (differing(found, plain) & equal).any()
    assert_sound(batch, found)
    swapped = np.r_[4:8, 0:4]
    assert not differing(DECODER.run(batch.rows(swapped)), jax.tree.map(lambda x: x[swapped], found)).any()


def assert_sound(batch: Batch, found: specjax.Output) -> None:
    asked, stops = np.asarray(batch.sampling.max_tokens), np.asarray(batch.sampling.stop_token_ids)
    assert (found.length <= np.where(batch.length > 0, asked, 0)).all()
    assert ((found.tokens >= 0) & (found.tokens < V)).all()
    assert (found.tokens[np.arange(NEW) >= found.length[:, None]] == 0).all()
    np.testing.assert_array_equal(found.stats.emitted, found.length)
    assert (found.stats.accepted <= found.stats.drafted).all()
    assert (found.stats.steps <= found.length).all()
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


@pytest.mark.parametrize(
    ("alarm", "drafter"),
    [
        (jax.debug_key_reuse, TableDrafter(num_tokens=3)),
        (jax.debug_key_reuse, ModelDrafter(model=MODEL, num_tokens=3, vocab_size=V)),
        (jax.debug_nans, ModelDrafter(model=MODEL, num_tokens=3, vocab_size=V)),
    ],
)
def test_decoding_raises_no_alarm(alarm, drafter):
    """A fresh program, traced under the alarm: every rule, sampled drafts, greedy and sampled rows, all transforms."""
    config = DecodeConfig(target=MODEL, drafter=drafter, verifier=EachRow(), pad_id=3)
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
    params = Params(target=TABLE, draft=TABLE.at[2, 3].set(-jnp.inf))
    with alarm(True):
        found = specjax.generate(params, jax.random.key(1), prompt, length, sampling, config=config, max_new_tokens=NEW)
        assert found.length.tolist() == [NEW] * 6 + [0, NEW]
    assert np.asarray(found.stats.accepted).sum() > 0


def test_the_alarms_do_ring():
    """Or nothing would be shown above."""

    def twice(key):
        return jax.random.uniform(key) + jax.random.uniform(key)

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(twice)(jax.random.key(0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(lambda x: x / x)(jnp.zeros(2)).block_until_ready()
