"""Group d of the cases: 28 (rollback of two caches), 29 (sliding windows), 31 (early exit), 33 (reuse), 34 (edges)."""

import dataclasses
import functools

import decoding
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import HistoryModel, history_params

from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.models.transformer import Transformer
from specjax.sampling import sampling_params
from specjax.types import Params
from specjax.verify import Greedy

# ---- A draft model that is right except where it is told not to be ----

VOCAB, SALT = 11, history_params(7)
HISTORY = HistoryModel(vocab_size=VOCAB)
BATCH, NEW, COLUMNS = 9, 120, 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlawedModel(HistoryModel):
    """The target, but for `params["wrong"]` `[B, N]`: there another token than its own is the most likely one."""

    def apply(self, params, tokens, positions, cache):
        output, cache = super().apply(params["salt"], tokens, positions, cache)
        row = jnp.arange(len(tokens))[:, None]
        wrong = params["wrong"][row, jnp.clip(positions + 1, 0, COLUMNS - 1)]
        logits = jnp.where(wrong[..., None], jnp.roll(output.logits, 1, axis=-1), output.logits)
        return output.replace(logits=logits), cache


def flawed(window):
    drafter = ModelDrafter(model=FlawedModel(vocab_size=VOCAB), num_tokens=window, vocab_size=VOCAB)
    return DecodeConfig(target=HISTORY, drafter=drafter, verifier=Greedy())


def play(config, prompts, wrong, *, width=16, max_tokens=NEW):
    """All steps with every invariant asserted after each: among them that both caches hold the text but its last."""
    params = Params(target=SALT, draft={"salt": SALT, "wrong": jnp.asarray(wrong)})
    sampling = sampling_params(BATCH, max_tokens=max_tokens)
    prompt = decoding.pad(prompts, width)
    return decoding.play(params, jax.random.key(0), *prompt, sampling, config=config, max_new_tokens=NEW)


def continuation(prompt, count):
    return reference.greedy_decode(lambda text: HISTORY.logits_after(SALT, text), prompt, max_tokens=count)


# ---- Case 28 ----


@pytest.mark.parametrize("window", [2, 5])
def test_case_28_both_caches_follow_every_acceptance(window):
    """Row a accepts exactly a = 0, 1, ..., K tokens a round, for 20 rounds and more; the last rows at random.

    A draft cache one entry short, or with an entry too many, would give other proposals and other counts.
    """
    prompts = [[1 + row] * (1 + row) for row in range(BATCH)]
    wrong = np.random.default_rng(0).random((BATCH, COLUMNS)) < 0.3
    for row in range(window + 1):
        period, columns = row + 1, np.arange(COLUMNS)
        wrong[row] = (columns - len(prompts[row])) % period == row if row < window else False
    states = play(flawed(window), prompts, wrong)
    assert decoding.outputs(states[-1]) == [continuation(prompt, NEW) for prompt in prompts]
    for row in range(window + 1):
        rounds = NEW // (row + 1)
        assert states[-1].stats.histogram[row].tolist() == [rounds * (n == row) for n in range(window + 1)]
        assert rounds >= 20
    assert (states[-1].stats.histogram[window + 1 :] > 0).all()


TINY = Transformer(harness.tiny_config())
SELF = DecodeConfig(
    target=TINY, drafter=ModelDrafter(model=TINY, num_tokens=4, vocab_size=TINY.vocab_size), verifier=Greedy()
)
LONG = 200


def begin(config, params, prompts, new):
    sampling = sampling_params(len(prompts), max_tokens=new)
    prompt = decoding.pad(prompts, 24)
    return decoding.begin(params, jax.random.key(0), *prompt, sampling, config=config, max_new_tokens=new), sampling


def texts(count, length, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (count, length)).tolist()


def test_case_28_a_self_drafter_is_right_for_200_tokens():
    """Nothing decays as the text grows: rotations, slots and trims of both caches agree at every length."""
    params = Params(target=harness.tiny_params(), draft=harness.tiny_params())
    state, sampling = begin(SELF, params, [text[: 2 + 7 * row] for row, text in enumerate(texts(4, 24))], LONG)
    state = decoding.proceed(params, state, sampling, config=SELF)
    assert state.stats.accepted.tolist() == state.stats.drafted.tolist() == [160] * 4
    assert state.stats.steps.tolist() == [40] * 4


# ---- Case 29 ----


@functools.cache
def windowed(windows):
    config = harness.tiny_config(sliding_windows=windows)
    return Transformer(config), config, harness.tiny_params(3, config), decoding.fast_jit(Transformer(config).apply)


@pytest.mark.parametrize("windows", [(8, 8), (8, None), (None, 3)])
def test_case_29_blocks_cross_the_window_at_every_offset(windows):
    """Blocks of 5 tokens, of which row r keeps r + 1 after the first: the rest is junk that is overwritten.

    Each block's first query still sees its full window, although later queries of the block have moved on.
    """
    model, config, params, apply = windowed(windows)
    text = np.random.default_rng(1).integers(0, 61, (5, 41))
    right = [reference.forward(params, config, row) for row in text]
    cache, junk = model.init_cache(params, 5, 48), np.random.default_rng(2)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    done, kept = np.zeros(5, int), np.full(5, 5)
    while (done < 36).any():
        offsets = np.arange(5)
        columns = done[:, None] + offsets
        tokens = np.where(
            offsets < kept[:, None], np.take_along_axis(text, columns, axis=1), junk.integers(0, 61, (5, 5))
        )
        output, cache = apply(params, tokens, np.where(done[:, None] < 36, columns, -1), cache)
        for row, count in enumerate(kept):
            seen = right[row][done[row] : done[row] + count]
            np.testing.assert_allclose(output.logits[row, :count], seen, atol=1e-4)
        done += kept
        kept = np.minimum(np.arange(1, 6), 36 - done)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == size


# ---- Case 31 ----


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_case_31_early_exit_shares_the_cache_and_leaves_it_alone(exit_layer):
    """Equal to plain decoding for every exit; with all layers everything is accepted; the cache is a fresh one's.

    The drafter writes nothing, so what the target's cache holds of the text is what one whole forward puts there.
    """
    params, prompts = (
        Params(target=harness.tiny_params()),
        [text[: 3 + 5 * row] for row, text in enumerate(texts(4, 24))],
    )
    drafter = EarlyExitDrafter(target=TINY, exit_layer=exit_layer, num_tokens=4)
    config = DecodeConfig(target=TINY, drafter=drafter, verifier=Greedy())
    state, sampling = begin(config, params, prompts, 30)
    state = decoding.proceed(params, state, sampling, 3, config=config)
    spoilt = spoil(state)
    final, other = (decoding.proceed(params, each, sampling, config=config) for each in (state, spoilt))
    assert decoding.outputs(final) == [greedy_text(prompt, 30) for prompt in prompts]
    assert decoding.outputs(other) == decoding.outputs(final)
    assert (final.stats.accepted == final.stats.drafted).all() == (exit_layer == 2)
    assert (final.stats.accepted > 0).all()
    assert_cache_is_fresh(params.target, final)


def greedy_text(prompt, count):
    params, config = harness.tiny_params(), TINY.config
    return reference.greedy_decode(lambda text: reference.forward(params, config, text)[-1], prompt, max_tokens=count)


def spoil(state):
    """The state with huge numbers in every slot that stands for no committed token."""
    stale = jnp.arange(state.cache.keys[0].shape[2]) >= state.cache.length[:, None]
    cache = jax.tree.map(lambda x: jnp.where(stale[:, None, :, None], 1e4, x) if x.ndim == 4 else x + 0, state.cache)
    return jax.tree.map(jnp.copy, state).replace(cache=cache)


@decoding.fast_jit
def read_whole(params, tokens):
    cache = TINY.init_cache(params, *tokens.shape)
    return TINY.apply(params, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), cache)[1]


def assert_cache_is_fresh(params, state):
    fresh = read_whole(params, state.context.tokens)
    known = np.arange(fresh.keys[0].shape[2]) < np.asarray(state.cache.length)[:, None]
    assert (state.cache.length == state.context.length - 1).all()
    for old, new in zip(state.cache.keys + state.cache.values, fresh.keys + fresh.values, strict=True):
        np.testing.assert_allclose(
            np.moveaxis(np.asarray(old), 1, 2)[known], np.moveaxis(np.asarray(new), 1, 2)[known], atol=1e-4
        )


# ---- Case 33 ----


def test_case_33_a_reused_state_drafts_like_a_cold_one():
    """The caches of finished texts are rolled back to a common prefix of 16 tokens and go on with another one.

    specjax has no prefix cache; this is what one would do. Caches of another prefix show at once.
    """
    params = Params(target=harness.tiny_params(), draft=harness.tiny_params(1))
    first = texts(4, 24)
    second = [[*text[:16], (text[16] + 1) % 61] for text in first]
    used, sampling = begin(SELF, params, first, LONG)
    used = decoding.proceed(params, used, sampling, 20, config=SELF)
    cold, _ = begin(SELF, params, second, LONG)
    right = propose(params, cold, sampling)
    warm = rolled_back(cold, used, jnp.arange(4))
    proposal, other = (
        propose(params, warm, sampling),
        propose(params, rolled_back(cold, used, jnp.arange(4)[::-1]), sampling),
    )
    np.testing.assert_array_equal(proposal.tokens, right.tokens)
    np.testing.assert_allclose(np.exp(proposal.log_probs), np.exp(right.log_probs), atol=1e-6)
    assert (other.tokens != right.tokens).any(axis=1).all()
    assert_cache_is_fresh(params.target, warm)
    ends = [decoding.proceed(params, state, sampling, config=SELF) for state in (warm, cold)]
    assert decoding.outputs(ends[0]) == decoding.outputs(ends[1])
    jax.tree.map(np.testing.assert_array_equal, ends[0].stats, ends[1].stats)


def rolled_back(cold, used, order):
    """The cold state with the caches of the used one, at the cold one's lengths."""

    def reuse(new, old):
        return jax.tree.map(lambda leaf: leaf[order], old).replace(length=new.length)

    copy = jax.tree.map(jnp.copy, cold)
    return copy.replace(cache=reuse(copy.cache, used.cache), draft_state=reuse(copy.draft_state, used.draft_state))


@decoding.fast_jit
def propose(params, state, sampling):
    keys = SELF.verifier.draft_keys(state.keys, state.context.length, 4)
    return SELF.drafter.draft(params, keys, state.draft_state, state.context, sampling, state.cache)[0]


# ---- Case 34 ----


@pytest.mark.parametrize("shift", [0, 1])
def test_case_34_rows_end_at_every_edge_of_the_buffer(shift):
    """Texts of 0..8 tokens and limits around the windows' ends, random acceptance: the same in a wider buffer.

    `play` asserts after each step that no slot outside a row's own window is written; here also that none behind its
    last window ever was, and that a row of no tokens stays empty.
    """
    prompts = [[1 + row] * row for row in range(BATCH)]
    limits = [NEW - shift * row for row in range(BATCH)]
    wrong = np.random.default_rng(3).random((BATCH, COLUMNS)) < 0.4
    narrow, wide = (play(flawed(5), prompts, wrong, width=width, max_tokens=limits)[-1] for width in (16, 24))
    right = [[], *(continuation(prompt, limit) for prompt, limit in zip(prompts[1:], limits[1:], strict=True))]
    assert decoding.outputs(narrow) == decoding.outputs(wide) == right
    jax.tree.map(np.testing.assert_array_equal, narrow.stats, wide.stats)
    assert narrow.stats.steps[1:].min() > 30
    for state in (narrow, wide):
        written = state.cache.keys[0][:, 0, :, 0] >= 0
        assert not (written & (np.arange(written.shape[1]) >= state.limit[:, None])).any()
        assert not written[0].any()
