"""Group e of the cases: 37 (what a row draws does not depend on its neighbours) and 39 (interruption and resumption).

The contract: under `ExactMatch` noise belongs to the row key and the absolute position, so stopping, resuming with the
text so far as prompt, and other limits give the same tokens. The other verifiers key it by window: a row's tokens are
still its own whatever the batch, but a resumed run promises the law and fresh noise, not the same tokens.
"""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import NEW, VERIFIERS, VOCAB, WIDTH, WINDOW, rows, run, table_config

from specjax.drafters.ngram import NGramDrafter
from specjax.sampling import Role, position_keys, sampling_params, window_keys
from specjax.types import Params
from specjax.verify import ExactMatch

NGRAM = NGramDrafter(num_tokens=WINDOW)
SAMPLING = [verifier for verifier in VERIFIERS if type(verifier).__name__ != "Greedy"]
PARAMS = Params(target=jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(VOCAB, VOCAB)), jnp.float32))
REPEATS, FRESH = [1, 2, 3, 1, 2, 3, 1, 2, 3], [5]


def decode(verifier, prompts, **options):
    return run(table_config(NGRAM, verifier), PARAMS, prompts, temperature=options.pop("temperature", 1.0), **options)


# ---- Case 37 ----


@pytest.mark.parametrize("verifier", SAMPLING)
@pytest.mark.parametrize("prompt", [REPEATS, FRESH])
def test_case_37_a_row_draws_the_same_in_any_company(verifier, prompt):
    """Alone among padding, beside rows that draft at once, beside rows that never do, and in another slot."""
    alone = decode(verifier, [prompt], seeds=[7])
    drafting = decode(verifier, [prompt] + [REPEATS] * 7, seeds=[7, *range(20, 27)])
    silent = decode(verifier, [prompt] + [FRESH] * 7, seeds=[7, *range(20, 27)], max_tokens=[NEW] + [1] * 7)
    moved = decode(verifier, [REPEATS, FRESH, FRESH, REPEATS, prompt], seeds=[1, 2, 3, 4, 7])
    assert alone.stats.drafted[0] > 0
    assert drafting.stats.drafted[1:].min() > 0
    assert silent.stats.drafted[1:].max() == 0
    assert len(rows(alone)[0]) == NEW
    for output, row in ((drafting, 0), (silent, 0), (moved, 4)):
        assert rows(output)[row] == rows(alone)[0]
        jax.tree.map(lambda a, b, r=row: np.testing.assert_array_equal(a[r], b[0]), output.stats, alone.stats)


def test_case_37_a_batch_of_one_draws_the_same():
    tokens = jnp.zeros((1, WIDTH), jnp.int32).at[0, : len(REPEATS)].set(jnp.array(REPEATS))
    single = decoding.generate(
        PARAMS,
        jax.random.key(7)[None],
        tokens,
        jnp.array([len(REPEATS)]),
        sampling_params(1, temperature=1.0, max_tokens=NEW),
        config=table_config(NGRAM),
        max_new_tokens=NEW,
    )
    assert rows(single)[0] == rows(decode(ExactMatch(), [FRESH, REPEATS, REPEATS], seeds=[3, 7, 5]))[1]


@pytest.mark.parametrize("verifier", SAMPLING)
def test_case_37_rows_of_one_prompt_have_noise_of_their_own(verifier):
    """Row keys decide: equal keys, equal texts; different keys, different texts; and a seed is reproducible."""
    first = rows(decode(verifier, [REPEATS] * 8, seeds=[1, 2, 3, 4, 1, 2, 3, 4]))
    assert first[:4] == first[4:]
    assert len({tuple(row) for row in first}) == 4
    assert rows(decode(verifier, [REPEATS] * 8, seeds=[1, 2, 3, 4, 1, 2, 3, 4])) == first


# ---- Case 39 ----

LIMITS = list(range(5, 13))


@pytest.mark.parametrize("hot", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("prompt", [[1, 2, 1], FRESH])
def test_case_39_stopped_and_resumed_runs_are_the_uninterrupted_one(prompt, hot):
    """Stopped after 5, 6, ..., 12 of 32 tokens, then resumed with the text so far as prompt and the same row key."""
    whole = rows(decode(ExactMatch(), [prompt], seeds=[9], temperature=hot))[0]
    stopped = decode(ExactMatch(), [prompt] * 8, seeds=[9], temperature=hot, max_tokens=LIMITS)
    assert rows(stopped) == [whole[:limit] for limit in LIMITS]
    texts = [prompt + row for row in rows(stopped)]
    resumed = decode(ExactMatch(), texts, seeds=[9], temperature=hot, max_tokens=[NEW - limit for limit in LIMITS])
    assert rows(resumed) == [whole[limit:] for limit in LIMITS]
    assert resumed.stats.drafted.min() > 0


def test_case_39_plain_and_speculative_runs_resume_each_other():
    whole = rows(run(table_config(NGRAM), PARAMS, [FRESH], seeds=[9], temperature=1.0, plain=True))[0]
    stopped = rows(decode(ExactMatch(), [FRESH] * 8, seeds=[9], max_tokens=LIMITS))
    texts, limits = [FRESH + row for row in stopped], [NEW - limit for limit in LIMITS]
    options = {"seeds": [9], "temperature": 1.0, "max_tokens": limits}
    resumed = rows(run(table_config(NGRAM), PARAMS, texts, plain=True, **options))
    assert [[*first, *rest] for first, rest in zip(stopped, resumed, strict=True)] == [whole] * 8


@pytest.mark.parametrize("verifier", SAMPLING)
def test_case_39_a_resumed_run_has_fresh_noise(verifier):
    """Under a uniform law the text is the noise: what follows an interruption repeats nothing of what came before."""
    params = Params(target=jnp.zeros((VOCAB, VOCAB)))
    config = table_config(NGRAM, verifier)
    first = rows(run(config, params, [[3]] * 8, seeds=[9], temperature=1.0, max_tokens=LIMITS))
    second = rows(run(config, params, [[3, *row] for row in first], seeds=[9], temperature=1.0, max_tokens=LIMITS))
    for early, late in zip(first, second, strict=True):
        assert np.mean(np.array(early) == np.array(late)) < 0.5


def test_case_39_no_two_draws_share_a_key():
    """Every window start, offset and role, and every position of the plain noise, for two rows: all keys differ."""
    keys = jax.vmap(jax.random.key)(jnp.array([9, 10]))
    used = [position_keys(keys, jnp.tile(jnp.arange(48), (2, 1)))]
    starts = [jnp.full(2, start) for start in range(0, 48, 5)]
    roles = [role for role in Role if role is not Role.TARGET]
    used += [window_keys(keys, start, WINDOW + 1, role) for start in starts for role in roles]
    data = np.concatenate([jax.random.key_data(block).reshape(-1, 2) for block in used])
    assert len(np.unique(data, axis=0)) == len(data) == 2 * 48 + 2 * len(starts) * 4 * (WINDOW + 1)
