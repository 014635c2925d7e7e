"""Acceptance by coin: as often as asked for, and nowhere but in measurements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import fast_jit

from specjax.benchmark.synthetic import SyntheticDrafter, SyntheticVerifier
from specjax.drafters.ngram import NGramDrafter
from specjax.jobs.options import OPTIONS, parse_options
from specjax.jobs.settings import VERIFIERS
from specjax.sampling import sampling_params
from specjax.types import Context, Draft, Params

ROWS, WINDOW, VOCAB = 4000, 3, 8


def judge(rate, length=WINDOW):
    keys = jax.random.split(jax.random.key(0), ROWS)
    draft = Draft(tokens=jnp.full((ROWS, WINDOW), 5), length=jnp.broadcast_to(length, ROWS))
    laws = jnp.full((ROWS, WINDOW + 1, VOCAB), -jnp.inf).at[..., 2].set(0.0)
    return fast_jit(SyntheticVerifier(rate=rate))(keys, jnp.zeros(ROWS, jnp.int32), draft, laws)


def test_tokens_are_kept_as_often_as_asked():
    """Of 3 tokens kept with chance a each: n of them with chance a^n (1 - a), all with a^3."""
    verdict = judge(0.8)
    counts = np.bincount(verdict.num_accepted, minlength=4)
    chances = np.array([0.2, 0.16, 0.128, 0.512])
    np.testing.assert_array_less(abs(counts - ROWS * chances), 4 * np.sqrt(ROWS * chances * (1 - chances)))
    tokens, kept = np.asarray(verdict.tokens), np.asarray(verdict.num_accepted)[:, None]
    assert (tokens[np.arange(4) < kept] == 5).all()
    assert (tokens[np.arange(4) == kept] == 2).all()


def test_certain_coins():
    lengths = jnp.arange(ROWS) % (WINDOW + 1)
    assert (judge(1.0, lengths).num_accepted == lengths).all()
    assert (judge(0.0, lengths).num_accepted == 0).all()


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_chance(rate):
    with pytest.raises(ValueError, match=r"synthetic acceptance in 0\.\.1"):
        SyntheticVerifier(rate=rate)


def test_windows_are_always_full():
    """The n-gram drafter finds nothing in the second text; the pending token stands in."""
    drafter = SyntheticDrafter(drafter=NGramDrafter(num_tokens=3))
    tokens = jnp.array([[1, 2, 1, 2, 0, 0, 0, 0], [4, 5, 6, 7, 0, 0, 0, 0]])
    context = Context(tokens=tokens, length=jnp.array([4, 4]), prompt_length=jnp.array([4, 4]))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    draft, _ = fast_jit(drafter.draft)(Params(target=None), keys, None, context, sampling_params(2, max_tokens=4), None)
    assert draft.length.tolist() == [3, 3]
    assert draft.tokens.tolist() == [[1, 2, 1], [7, 7, 7]]
    assert draft.log_probs is None


def test_no_option_of_generate_leads_to_it():
    assert not any("synthetic" in name for name in (*OPTIONS, *VERIFIERS))
    for options in (["--verifier", "synthetic"], ["--synthetic-acceptance", "0.8"], ["--set", "verifier=synthetic"]):
        with pytest.raises(ValueError, match=r"expected|unrecognized"):
            parse_options(["--prompt", "x", *options])
