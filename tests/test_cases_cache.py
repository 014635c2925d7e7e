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
from decoding import PAIR, PAIR_PARAMS, PAIR_ROWS, SELF_PARAMS, TINY
from harness import HistoryModel, history_params

from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.models.transformer import Transformer
from specjax.sampling import sampling_params
from specjax.testing.rows import Limited
from specjax.types import Params
from specjax.verify import Greedy

# ---- A draft model that is right except where it is told not to be ----

VOCAB, SALT = 11, history_params(7)
HISTORY = HistoryModel(vocab_size=VOCAB)
BATCH, NEW, COLUMNS, WINDOW = 25, 120, 160, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlawedModel(HistoryModel):
    """The target, but for `params["wrong"]` `[B, N]`: there another token than its own is the most likely one."""

    def apply(self, params, tokens, positions, cache):
        output, cache = super().apply(params["salt"], tokens, positions, cache)
        row = jnp.arange(len(tokens))[:, None]
        wrong = params["wrong"][row, jnp.clip(positions + 1, 0, COLUMNS - 1)]
        logits = jnp.where(wrong[..., None], jnp.roll(output.logits, 1, axis=-1), output.logits)
        return output.replace(logits=logits), cache


MODEL = ModelDrafter(model=FlawedModel(vocab_size=VOCAB), num_tokens=WINDOW, vocab_size=VOCAB)
FLAWED = DecodeConfig(target=HISTORY, drafter=Limited(MODEL), verifier=Greedy())


def play(prompts, wrong, windows, *, width=16, max_tokens=NEW):
    """All steps with every invariant asserted after each: among them that both caches hold the text but its last."""
    draft = {"draft": {"salt": SALT, "wrong": jnp.asarray(wrong)}, "limit": jnp.asarray(windows)}
    sampling = sampling_params(BATCH, max_tokens=max_tokens)
    prompt = decoding.pad(prompts, width)
    params = Params(target=SALT, draft=draft)
    return decoding.play(params, jax.random.key(0), *prompt, sampling, config=FLAWED, max_new_tokens=NEW)


def continuation(prompt, count):
    return reference.greedy_decode(lambda text: HISTORY.logits_after(SALT, text), prompt, max_tokens=count)


# ---- Case 28 ----


def test_case_28_both_caches_follow_every_acceptance():
    """Rows of K = 1..5 accept exactly a = 0, 1, ..., K tokens a round, for 20 rounds and more, or a random number.

    A draft cache one entry short, or with an entry too many, would give other proposals and other counts.
    """
    kinds = [(window, a) for window in range(1, WINDOW + 1) for a in (*range(window + 1), None)]
    prompts = [[1 + row % 10] * (1 + row % 9) for row in range(BATCH)]
    wrong, columns = np.random.default_rng(0).random((BATCH, COLUMNS)) < 0.3, np.arange(COLUMNS)
    for row, (window, a) in enumerate(kinds):
        if a is not None:
            wrong[row] = (columns - len(prompts[row])) % (a + 1) == a if a < window else False
    final = play(prompts, wrong, [window for window, _ in kinds])[-1]
    assert decoding.outputs(final) == [continuation(prompt, NEW) for prompt in prompts]
    for row, (window, a) in enumerate(kinds):
        histogram = final.stats.histogram[row].tolist()
        if a is None:
            assert all(histogram[: window + 1])
        else:
            assert NEW // (a + 1) >= 20
            assert histogram == [NEW // (a + 1) * (n == a) for n in range(WINDOW + 1)]


def texts(count, length, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (count, length)).tolist()


def test_case_28_a_self_drafter_is_right_for_200_tokens():
    """Nothing decays as the text grows: rotations, slots and trims of both caches agree at every length."""
    prompts = [text[: 1 + 3 * row // 2] for row, text in enumerate(texts(PAIR_ROWS, 24))]
    final = decoding.play_pair(SELF_PARAMS, prompts)[-1]
    assert final.stats.accepted.tolist() == final.stats.drafted.tolist() == [166] * PAIR_ROWS
    assert final.stats.steps.tolist() == [34] * PAIR_ROWS


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
        logits = np.asarray(output.logits)
        for row, count in enumerate(kept):
            seen = right[row][done[row] : done[row] + count]
            np.testing.assert_allclose(logits[row, :count], seen, rtol=1e-5, atol=1e-5)
        done += kept
        kept = np.minimum(np.arange(1, 6), 36 - done)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == size


# ---- Case 31 ----


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_case_31_early_exit_shares_the_cache_and_leaves_it_alone(exit_layer):
    """Equal to plain decoding for every exit; with all layers everything is accepted; the cache is a fresh one's.

    The drafter writes nothing, so what the target's cache holds of the text is what one whole forward puts there.
    """
    params = Params(target=harness.tiny_params())
    prompts = [text[: 3 + 5 * row] for row, text in enumerate(texts(4, 24))]
    drafter = EarlyExitDrafter(target=TINY, exit_layer=exit_layer, num_tokens=4)
    config = DecodeConfig(target=TINY, drafter=drafter, verifier=Greedy())
    sampling, prompt = sampling_params(4, max_tokens=30), decoding.pad(prompts, 24)
    state = decoding.begin(params, jax.random.key(0), *prompt, sampling, config=config, max_new_tokens=30)
    state = decoding.proceed(params, state, sampling, 3, config=config)
    spoilt = spoil(jax.tree.map(jnp.copy, state))
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
    stale = np.arange(state.cache.keys[0].shape[2]) >= np.asarray(state.cache.length)[:, None]

    def spoilt(leaf):
        return jnp.asarray(np.where(stale[:, None, :, None], np.float32(1e4), leaf) if leaf.ndim == 4 else leaf)

    return jax.tree.map(jnp.copy, state).replace(cache=jax.tree.map(spoilt, state.cache))


@decoding.fast_jit
def read_whole(params, tokens):
    cache = TINY.init_cache(params, *tokens.shape)
    return TINY.apply(params, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), cache)[1]


def assert_cache_is_fresh(params, state):
    fresh = read_whole(params, state.context.tokens)
    known = np.arange(fresh.keys[0].shape[2]) < np.asarray(state.cache.length)[:, None]
    assert state.cache.length.tolist() == (np.asarray(state.context.length) - 1).tolist()
    for old, new in zip(state.cache.keys + state.cache.values, fresh.keys + fresh.values, strict=True):
        np.testing.assert_allclose(
            np.moveaxis(np.asarray(old), 1, 2)[known], np.moveaxis(np.asarray(new), 1, 2)[known], atol=1e-4
        )


# ---- Case 33 ----


def test_case_33_a_reused_state_drafts_like_a_cold_one():
    """The caches of finished texts are rolled back to a common prefix of 16 tokens and go on with another one.

    specjax has no prefix cache; this is what one would do. Caches of another prefix show at once.
    """
    first = texts(PAIR_ROWS, 24)
    second = [[*text[:16], (text[16] + 1) % 61] for text in first]
    used, sampling = begin_pair(first)
    used = decoding.proceed(PAIR_PARAMS, used, sampling, 20, config=PAIR)
    cold, _ = begin_pair(second)
    warm, swapped = (rolled_back(cold, used, order) for order in (slice(None), slice(None, None, -1)))
    right, proposal, other = (decoding.propose(PAIR_PARAMS, x, sampling, config=PAIR) for x in (cold, warm, swapped))
    np.testing.assert_array_equal(proposal.tokens, right.tokens)
    np.testing.assert_allclose(np.exp(proposal.log_probs), np.exp(right.log_probs), atol=1e-6)
    assert (np.asarray(other.tokens) != right.tokens).any(axis=1).all()
    assert_cache_is_fresh(PAIR_PARAMS.target, warm)
    ends = [decoding.proceed(PAIR_PARAMS, state, sampling, config=PAIR) for state in (warm, cold)]
    assert decoding.outputs(ends[0]) == decoding.outputs(ends[1])
    jax.tree.map(np.testing.assert_array_equal, ends[0].stats, ends[1].stats)


def begin_pair(prompts):
    key, *prompt, sampling = decoding.pair_inputs(prompts, max_tokens=40)
    state = decoding.begin(PAIR_PARAMS, key, *prompt, sampling, config=PAIR, max_new_tokens=decoding.LONG)
    return state, sampling


def rolled_back(cold, used, order):
    """The cold state with the caches of the used one, at the cold one's lengths."""

    def reuse(new, old):
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[order]), old).replace(length=new.length)

    copy = jax.tree.map(jnp.copy, cold)
    return copy.replace(cache=reuse(copy.cache, used.cache), draft_state=reuse(copy.draft_state, used.draft_state))


# ---- Case 34 ----


def test_case_34_rows_end_at_every_edge_of_the_buffer():
    """Texts of 0..8 tokens and limits around the windows' ends, random acceptance: the same in a wider buffer.

    `play` asserts after each step that no slot outside a row's own window is written; here also that none behind its
    last window ever was, and that a row of no tokens stays empty.
    """
    prompts = [[1 + row % 10] * (row % 9) for row in range(2 * 9)]
    limits = [NEW - row // 9 * (row % 9) for row in range(2 * 9)]
    spare = [[]] * (BATCH - len(prompts))
    wrong = np.random.default_rng(3).random((BATCH, COLUMNS)) < 0.4
    options = {"windows": [WINDOW] * BATCH, "max_tokens": [*limits, *[0] * len(spare)]}
    narrow, wide = (play([*prompts, *spare], wrong, width=width, **options)[-1] for width in (16, 24))
    right = [continuation(prompt, limit) if prompt else [] for prompt, limit in zip(prompts, limits, strict=True)]
    assert decoding.outputs(narrow) == decoding.outputs(wide) == [*right, *spare]
    jax.tree.map(np.testing.assert_array_equal, narrow.stats, wide.stats)
    some = np.array([bool(prompt) for prompt in [*prompts, *spare]])
    assert narrow.stats.steps[some].min() > 30
    for state in (narrow, wide):
        written = state.cache.keys[0][:, 0, :, 0] >= 0
        assert not (written & (np.arange(written.shape[1]) >= state.limit[:, None])).any()
        assert not written[~some].any()
