"""The jitted entries: padding to buckets, donation, streaming. What they refuse is in test_decode_arguments.py."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import NEW, VOCAB, WINDOW, compilations, inputs, rows, sampling_rows, table_config

from specjax import compiled
from specjax.drafters.ngram import NGramDrafter
from specjax.pace import make_pace
from specjax.types import FinishReason, Params
from specjax.verify import ExactMatch, Greedy, Rejection

CONFIG = table_config(NGramDrafter(num_tokens=WINDOW), Greedy())
PARAMS = Params(target=jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(VOCAB, VOCAB)), jnp.float32))
PROMPTS = [[1, 2, 3, 1, 2, 3], [5], [4, 4]]


def arguments(**sampling):
    return *inputs(PROMPTS), sampling_rows(len(PROMPTS), **sampling)


# ---- Buckets ----


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (0, 16),
        (1, 16),
        (16, 16),
        (17, 24),
        (24, 24),
        (25, 32),
        (33, 48),
        (49, 64),
        (512, 512),
        (513, 768),
        (786432, 786432),
    ],
)
def test_bucket_boundaries(length, size):
    assert compiled.bucket(length) == size


def test_buckets_waste_a_third_at_most():
    """Each is at most one and a half times the one before, so a text fills two thirds of its bucket (from 16 on)."""
    steps = list(itertools.pairwise(compiled.BUCKETS))
    assert compiled.BUCKETS[0] == 16
    assert all(small < large <= 1.5 * small for small, large in steps)


def test_no_bucket_is_too_long_a_text():
    with pytest.raises(ValueError, match="at most 786432 tokens, got 786433"):
        compiled.bucket(786433)


def test_pad_prompts():
    tokens, length = compiled.pad_prompts([[5, 6, 7], [8] * 17], pad_id=9)
    assert tokens.dtype == length.dtype == jnp.int32
    assert tokens.tolist() == [[5, 6, 7] + [9] * 21, [8] * 17 + [9] * 7]
    assert length.tolist() == [3, 17]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_pad_prompts_refuses_empty_ones(prompts):
    with pytest.raises(ValueError, match=r"prompts of at least one token, got lengths \["):
        compiled.pad_prompts(prompts)


@pytest.mark.parametrize("prompt", [[1.9, 2.2], [2**32 + 5], [3, -1], [True], np.array([2**31], np.uint64), "text"])
def test_pad_prompts_refuses_what_is_no_id(prompt):
    """NumPy would make 1 and 2 of the first, and 5 of the second: another prompt."""
    with pytest.raises(ValueError, match=r"expected token ids, integers from 0 to 2\*\*31 - 1, got"):
        compiled.pad_prompts([[1], prompt])


def test_pad_prompts_takes_arrays():
    tokens, _ = compiled.pad_prompts([np.array([5, 6], np.uint64), jnp.array([7])])
    assert tokens[:, :2].tolist() == [[5, 6], [7, 0]]


# ---- Entries ----


def test_the_state_is_donated_and_nothing_else():
    """Its buffers live on in the state returned; params and parameters can be used again."""
    given = arguments()
    state = compiled.prefill(PARAMS, *given, config=CONFIG, max_new_tokens=NEW)
    after = compiled.decode_steps(PARAMS, state, given[-1], 1, config=CONFIG)
    donated = [leaf.is_deleted() for leaf in jax.tree.leaves(state)]
    assert all(donated)
    kept = jax.tree.leaves((PARAMS, given, after))
    assert not any(leaf.is_deleted() for leaf in kept)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        compiled.decode_steps(PARAMS, state, given[-1], 1, config=CONFIG)


def test_steps_add_up_and_share_a_program():
    """1 + 2 + the rest are all of them; their number is traced."""
    given = arguments()
    states = [compiled.prefill(PARAMS, *given, config=CONFIG, max_new_tokens=NEW) for _ in range(2)]
    whole = compiled.decode_steps(PARAMS, states[0], given[-1], config=CONFIG)
    state = compiled.decode_steps(PARAMS, states[1], given[-1], 1, config=CONFIG)
    one = state.stats.steps[:3].tolist()
    with compilations() as programs:
        state = compiled.decode_steps(PARAMS, state, given[-1], 2, config=CONFIG)
        three = np.asarray(state.stats.steps)[:3].tolist()
        state = compiled.decode_steps(PARAMS, state, given[-1], config=CONFIG)
    assert programs == []
    assert (one, three) == ([1] * 3, [3] * 3)
    assert (state.finish_reason == FinishReason.LENGTH).all()
    whole, state = (each.replace(keys=jax.random.key_data(each.keys)) for each in (whole, state))
    jax.tree.map(np.testing.assert_array_equal, whole, state)


def test_halves_and_whole_steps_are_the_same():
    """`draft_step` then `verify_step`, `decode_step`, and one of `decode_steps`: equal states, the old one donated."""
    given = arguments()
    first, second, third = (compiled.prefill(PARAMS, *given, config=CONFIG, max_new_tokens=NEW) for _ in range(3))
    one = compiled.decode_steps(PARAMS, first, given[-1], 1, config=CONFIG)
    whole = compiled.decode_step(PARAMS, second, given[-1], config=CONFIG)
    drafted, draft = compiled.draft_step(PARAMS, third, given[-1], config=CONFIG)
    halves = compiled.verify_step(PARAMS, drafted, draft, given[-1], config=CONFIG)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((second, third, drafted)))
    assert one.stats.steps[:3].tolist() == [1] * 3
    one, whole, halves = (each.replace(keys=jax.random.key_data(each.keys)) for each in (one, whole, halves))
    jax.tree.map(np.testing.assert_array_equal, whole, one)
    jax.tree.map(np.testing.assert_array_equal, halves, one)


def test_stream_is_generate_step_by_step():
    """Each output goes on from the one before; the last one is that of `generate`, counters included."""
    given = arguments(max_tokens=[NEW, 5, 0])
    outputs = list(compiled.stream(PARAMS, *given, config=CONFIG, max_new_tokens=NEW))
    right = compiled.generate(PARAMS, *given, config=CONFIG, max_new_tokens=NEW)
    jax.tree.map(np.testing.assert_array_equal, outputs[-1], right)
    assert len(outputs) == int(right.stats.steps.max())
    for before, after in itertools.pairwise([rows(output) for output in outputs]):
        assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))
        assert before != after


def test_closing_a_stream_stops_decoding(monkeypatch):
    steps, step = [], compiled.decode_steps
    monkeypatch.setattr(compiled, "decode_steps", lambda *args, **options: steps.append(1) or step(*args, **options))
    iterator = compiled.stream(PARAMS, *arguments(), config=CONFIG, max_new_tokens=NEW)
    assert steps == []
    first = next(iterator)
    next(iterator)
    iterator.close()
    assert len(steps) == 2
    assert first.stats.steps[:3].tolist() == [1, 1, 1]
    assert list(iterator) == []


def test_sampled_rows_with_one_key_do_not_decide_together():
    """What a row will draw its neighbour has drawn already, and learnt from."""
    key, prompt, length, hot = arguments(temperature=[1.0, 1.0, 0.0])
    alike, pace = key[jnp.array([0, 0, *range(2, len(key))])], make_pace(len(key), [1.0, 2.0])
    sampled = dataclasses.replace(CONFIG, verifier=Rejection())
    check = functools.partial(compiled.check_arguments, config=sampled, max_new_tokens=NEW)
    with pytest.raises(ValueError, match="no two are alike, for rows that are sampled with a pace"):
        check(alike, prompt, length, hot, pace)
    greedy, empty = arguments()[-1], length.at[1].set(0)
    for given in ((key, length, hot, pace), (alike, length, hot, None), (alike, length, greedy, pace)):
        check(given[0], prompt, *given[1:])
    check(alike, prompt, empty, hot, pace)
    exact = dataclasses.replace(CONFIG, verifier=ExactMatch())
    compiled.check_arguments(alike, prompt, length, hot, pace, config=exact, max_new_tokens=NEW)


def test_entries_can_be_traced_by_the_user():
    """Inside another jit shapes are still checked, and values are not looked at."""

    def traced(*given):
        return compiled.generate(PARAMS, *given, config=CONFIG, max_new_tokens=NEW)

    key, prompt, length, sampling = arguments()
    too_long = length + 1000
    output = jax.eval_shape(traced, key, prompt, too_long, sampling)
    assert output.tokens.shape == (8, NEW)
    with pytest.raises(ValueError, match=r"prompt_length of shape \[8\]"):
        jax.eval_shape(traced, key, prompt, length[:3], sampling)
    with pytest.raises(ValueError, match=r"prompt_length in 0\.\.16"):
        compiled.generate(PARAMS, key, prompt, too_long, sampling, config=CONFIG, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=r"prompt_length in 0\.\.16"):
        jax.eval_shape(lambda key: traced(key, prompt, too_long, sampling), key)


def test_only_params_are_traced():
    """Keys, prompts and a pace are constants of the user's program: they are looked at while it is traced."""
    given, pace = arguments(temperature=1.0), make_pace(8, [1.0, 2.0])
    config = dataclasses.replace(CONFIG, verifier=Rejection())
    run = functools.partial(compiled.generate, config=config, max_new_tokens=NEW)
    assert jax.eval_shape(lambda params: run(params, *given, pace), PARAMS).tokens.shape == (8, NEW)
    alike = given[0][jnp.zeros(8, jnp.int32)]
    with pytest.raises(ValueError, match="no two are alike"):
        jax.eval_shape(lambda params: run(params, alike, *given[1:], pace), PARAMS)
