"""The law against the reference law, the draws against the law, and the key schedule."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import fast_jit
from reference import Sampling, g_test

from specjax import logit_bias, sampling_params
from specjax.sampling import Role, categorical, law, most_likely, one_hot_law, position_keys, window_keys
from specjax.types import Context

B, T, V, N = 64, 3, 13, 12
"""Shapes of every call of the jitted law here: one program."""
jitted_law = fast_jit(law)
OFF = Sampling()


def laws(logits: Any, rows: list[Sampling], texts: Any = None, prompt_length: Any = None, first: Any = None) -> Any:
    """The library's laws `[B, T, V]` (probabilities) and health, for at most B rows; the rest repeat the first."""
    count = len(rows)
    index = np.concatenate([np.arange(count), np.zeros(B - count, int)])
    texts = np.zeros((count, N), np.int32) if texts is None else texts
    prompt_length = np.full(count, 2) if prompt_length is None else prompt_length
    first = prompt_length if first is None else first
    options = {
        field.name: [getattr(rows[r], field.name) for r in index]
        for field in dataclasses.fields(Sampling)
        if field.name != "logit_bias"
    }
    bias = jnp.asarray([rows[r].logit_bias or [0.0] * V for r in index], jnp.float32)
    sampling = sampling_params(B, max_tokens=100, **options, logit_bias=bias)
    context = Context(
        tokens=jnp.asarray(texts[index]),
        length=jnp.asarray(first[index], jnp.int32),
        prompt_length=jnp.asarray(prompt_length[index], jnp.int32),
    )
    seen = context.length[:, None] + jnp.arange(T)
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[jnp.asarray(index)], (B, T, V))
    log_probs, healthy = jitted_law(logits, sampling, context, seen)
    assert log_probs.dtype == jnp.float32
    return np.exp(np.asarray(log_probs, np.float64))[:count], np.asarray(healthy)[:count]


def law_of(logits: Any, **options: Any) -> np.ndarray:
    """The law `[V]` of one position."""
    full = np.full(V, -np.inf, np.float32)
    full[: len(logits)] = logits
    return laws(full[None, None], [Sampling(**options)])[0][0, 0]


# ---- Against the reference ----

RANDOM: dict[str, Any] = {
    "temperature": lambda rng: float(rng.choice([0, 1e-6, 0.3, 0.7, 1, 1.5, 3])),
    "top_k": lambda rng: int(rng.choice([1, 2, 3, 5, V - 1, V, V + 5])),
    "top_p": lambda rng: float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.99, 1])),
    "min_p": lambda rng: float(rng.choice([0.01, 0.1, 0.5, 1])),
    "repetition_penalty": lambda rng: float(rng.choice([0.5, 1.1, 2])),
    "presence_penalty": lambda rng: float(rng.choice([-0.5, 0.4, 2])),
    "frequency_penalty": lambda rng: float(rng.choice([-0.3, 0.25, 1])),
    "min_tokens": lambda rng: int(rng.integers(1, 6)),
    "logit_bias": lambda rng: tuple(np.where(rng.random(V) < 0.2, -np.inf, rng.normal(size=V)).tolist()),
}


def random_row(rng: np.random.Generator, names: list[str]) -> Sampling:
    options = {name: RANDOM[name](rng) for name in names}
    return Sampling(**options, stop_token_ids=tuple(rng.choice(V, rng.integers(0, 4), replace=False).tolist()))


def mixed_rows(rng: np.random.Generator) -> list[Sampling]:
    return [random_row(rng, [name for name in RANDOM if rng.random() < 0.5]) for _ in range(B)]


def assert_equals_reference(seed: int, rows: list[Sampling], logits: np.ndarray) -> None:
    """All rows at T positions, each after its own text; kept sets that hang on a rounding are let off."""
    rng = np.random.default_rng(seed + 1000)
    texts = rng.integers(0, V, (B, N)).astype(np.int32)
    prompt_length = rng.integers(1, 5, B)
    first = prompt_length + rng.integers(0, 5, B)
    found, healthy = laws(logits, rows, texts, prompt_length, first)
    assert healthy.all()
    close_calls = 0
    for row, sampling in enumerate(rows):
        for column in range(T):
            text = texts[row, : first[row] + column].tolist()
            right = reference.law(logits[row, column], sampling, text, prompt_length[row])
            nudged = [
                reference.law(logits[row, column], nudge(sampling, change), text, prompt_length[row])
                for change in (-1e-4, 1e-4)
            ]
            if any(((other > 0) != (right > 0)).any() for other in nudged):
                close_calls += 1
                continue
            np.testing.assert_array_equal(found[row, column] > 0, right > 0)
            np.testing.assert_allclose(found[row, column], right, rtol=2e-4, atol=1e-7)
    assert close_calls < 0.03 * B * T


def nudge(sampling: Sampling, change: float) -> Sampling:
    """A little more or less of the thresholds that rounding can move; 0 and 1 mean themselves."""
    top_p, min_p = sampling.top_p, sampling.min_p
    return dataclasses.replace(
        sampling,
        top_p=top_p if top_p == 1 else max(top_p + change, 1e-9),
        min_p=min_p if min_p == 1 else min_p * (1 + change),
    )


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """Ties, forbidden tokens, wide and narrow rows."""
    logits = (rng.normal(size=(B, T, V)) * rng.choice([0.5, 2, 8], (B, 1, 1))).astype(np.float32)
    tied = rng.random((B, T)) < 0.3
    logits = np.where(tied[..., None], np.round(logits), logits)
    allowed = rng.permuted(np.tile(np.arange(V), (B, T, 1)), axis=-1) < rng.integers(6, V + 1, (B, T, 1))
    return np.where(allowed, logits, -np.inf).astype(np.float32)


@pytest.mark.parametrize("name", RANDOM)
def test_each_transform_alone(name):
    rng = np.random.default_rng(hash_of(name))
    logits = rng.normal(size=(B, T, V)).astype(np.float32) * 2
    assert_equals_reference(1, [random_row(rng, [name]) for _ in range(B)], logits)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.parametrize("seed", range(4))
def test_mixed_rows_with_ties_and_forbidden_tokens(seed):
    rng = np.random.default_rng(seed)
    rows = [dataclasses.replace(row, logit_bias=None, min_tokens=0) for row in mixed_rows(rng)]
    assert_equals_reference(seed, rows, random_logits(rng))


@pytest.mark.parametrize("seed", range(4, 8))
def test_mixed_rows_with_biases_and_min_tokens(seed):
    rng = np.random.default_rng(seed)
    assert_equals_reference(seed, mixed_rows(rng), rng.normal(size=(B, T, V)).astype(np.float32) * 2)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    rows, logits = mixed_rows(rng), rng.normal(size=(B, T, V)).astype(np.float32)
    together, _ = laws(logits, rows)
    for row in range(0, B, 8):
        np.testing.assert_array_equal(laws(logits[row : row + 1], rows[row : row + 1])[0][0], together[row])


# ---- Right values ----


@pytest.mark.parametrize(
    ("probs", "options", "right"),
    [
        ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.4}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.75}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_k": 2}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"temperature": 0.5}, [0.684932, 0.246575, 0.061644, 0.006849]),
        ([0.5, 0.3, 0.15, 0.05], {"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.6}, [0.571429, 0.428571, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.7, "min_p": 0.8}, [1, 0, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.7, "min_p": 0.7}, [0.571429, 0.428571, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5, "top_p": 0.6}, [0.64, 0.36, 0, 0]),
    ],
)
def test_transforms(probs, options, right):
    np.testing.assert_allclose(law_of(np.log(probs), **options)[:4], right, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.5}, [0, 1, 2, 3]),
        ({"top_p": 0.51}, [0, 1, 2, 3, 4]),
        ({"min_p": 1}, [*range(8)]),
    ],
)
def test_ties_go_to_the_lowest_ids(options, kept):
    found = law_of(np.zeros(8), **options)
    assert np.flatnonzero(found).tolist() == kept
    np.testing.assert_allclose(found[kept], 1 / len(kept), rtol=1e-6)


def test_two_tokens_tied_at_the_edge():
    found = law_of([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2)
    assert np.flatnonzero(found).tolist() == [1, 2]
    found = law_of(np.log([0.1, 0.5, 0.2, 0.2]), top_p=0.7)
    assert np.flatnonzero(found).tolist() == [1, 2]


def test_greedy_rows_are_one_hot_at_the_lowest_best_id():
    found = law_of([1.0, 5.0, 5.0, -np.inf], temperature=0.0, top_k=3, top_p=0.9)
    assert found.tolist() == [0, 1, *[0] * (V - 2)]
    np.testing.assert_array_equal(np.exp(one_hot_law(most_likely(jnp.array([[2.0, 3.0, 3.0]])), 3)), [[0, 1, 0]])


def test_cold_rows_are_greedy_without_overflow():
    """At temperature 1e-6, and at the smallest a float32 can hold."""
    for temperature in (1e-6, 1.2e-38):
        assert law_of([1.0, 5.0, 4.99, -3.0], temperature=temperature).tolist() == [0, 1, *[0] * (V - 2)]


def test_window_positions_count_the_drafted_tokens_before_them():
    """Position i of a window sees the i drafted tokens behind the text, and nothing later."""
    text = np.array([[9, 9, 0, 1, 1, 5, 5, 5, 5, 5, 5, 5]], np.int32)
    found, _ = laws(np.zeros((1, T, V)), [Sampling(frequency_penalty=1.0)], text, np.array([2]), np.array([3]))
    for column, counts in enumerate([{0: 1}, {0: 1, 1: 1}, {0: 1, 1: 2}]):
        logits = np.zeros(V)
        for token, count in counts.items():
            logits[token] -= count
        np.testing.assert_allclose(found[0, column], reference.softmax(logits), rtol=1e-5)


def test_repetition_counts_the_prompt_and_presence_does_not():
    text = np.array([[7, 7, *[0] * (N - 2)]], np.int32)
    for options, penalised in (({"repetition_penalty": 2.0}, 0.5), ({"presence_penalty": 2.0}, 1.0)):
        found, _ = laws(np.ones((1, T, V)), [Sampling(**options)], text, np.array([2]), np.array([2]))
        assert found[0, 0, 7] / found[0, 0, 8] == pytest.approx(math.exp(penalised - 1), rel=1e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_positions_without_a_law_are_flagged_and_harmless(broken):
    """The other positions and rows of the batch keep their laws."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, T, V)).astype(np.float32)
    rows = [OFF, Sampling(temperature=0.0), Sampling(top_p=0.5, top_k=4, frequency_penalty=0.5)]
    whole, _ = laws(logits, rows)
    spoiled = logits.copy()
    spoiled[0, 1, 5], spoiled[1, 0, 3], spoiled[2, 2] = broken, broken, -np.inf
    found, healthy = laws(spoiled, rows)
    assert healthy.tolist() == [[True, False, True], [False, True, True], [True, True, False]]
    assert found[~healthy].tolist() == [[1, *[0] * (V - 1)]] * 3
    np.testing.assert_array_equal(found[healthy], whole[healthy])


def test_nothing_left_to_sample_is_flagged():
    rows = [Sampling(logit_bias=(-np.inf,) * V), Sampling(min_tokens=1, stop_token_ids=(2,), logit_bias=only(2)), OFF]
    _, healthy = laws(np.zeros((3, T, V)), rows)
    assert healthy.tolist() == [[False] * 3, [False, True, True], [True] * 3]


def only(token: int) -> tuple[float, ...]:
    return tuple(0.0 if i == token else -math.inf for i in range(V))


@pytest.mark.parametrize("options", [{"top_k": [40]}, {"top_p": [0.9]}, {"top_p": [0.3]}])
def test_wide_vocabulary_keeps_the_sorted_prefix(options):
    """Thousands of ties among 50,000 bfloat16 logits, against a stable sort."""
    size = 50_000
    rng = np.random.default_rng(2)
    logits = np.asarray(jnp.asarray(rng.normal(size=size) * 3, jnp.bfloat16).astype(jnp.float32))
    zero = jnp.zeros(1, jnp.int32)
    context = Context(tokens=jnp.zeros((1, 1), jnp.int32), length=zero, prompt_length=zero)
    sampling = sampling_params(1, temperature=1.0, max_tokens=1, **options)
    found = np.exp(np.asarray(law(jnp.asarray(logits)[None, None], sampling, context, zero[None])[0][0, 0], np.float64))
    right = reference.law(logits, Sampling(**{name: value[0] for name, value in options.items()}), [], 0)
    threshold = right[right > 0].min()
    missing = np.flatnonzero((found > 0) != (right > 0))
    assert len(missing) <= 2  # float32 sums of 50,000 masses may end one token earlier or later
    assert (found[found > 0] >= threshold * 0.99).all()
    tied = np.flatnonzero(logits == logits[found > 0].min())
    kept = found[tied] > 0
    assert (kept == (np.arange(len(tied)) < kept.sum())).all()
    np.testing.assert_allclose(found.sum(), 1, atol=1e-5)


# ---- Draws ----


def test_draws_follow_the_law():
    probs = np.array([0.05, 0, 0.5, 0.25, 0, 0.2])
    keys = jax.random.split(jax.random.key(0), (4, 10_000))
    drawn = np.asarray(fast_jit(categorical)(keys, jnp.broadcast_to(jnp.log(probs) - 3, (4, 10_000, 6))))
    assert drawn.shape == (4, 10_000)
    assert drawn.dtype == np.int32
    assert g_test(np.bincount(drawn.ravel(), minlength=6), probs) > 1e-4
    for row in drawn:
        assert g_test(np.bincount(row, minlength=6), probs) > 1e-4


def test_each_draw_uses_its_own_key():
    keys = jax.random.split(jax.random.key(1), (2, 3))
    flat = jnp.zeros((2, 3, 1000))
    drawn = categorical(keys, flat)
    assert len(set(drawn.ravel().tolist())) == 6
    for place in np.ndindex(2, 3):
        noise = jax.random.gumbel(keys[place], (1000,), mode="high")
        assert drawn[place] == jnp.argmax(noise)


# ---- Keys ----


def test_keys_of_all_roles_windows_offsets_and_rows_differ():
    keys = jax.random.split(jax.random.key(0), 3)
    bits = []
    for start in range(20):
        begin = jnp.full(3, start)
        for role in (Role.DRAFT, Role.ACCEPT, Role.RESIDUAL, Role.BONUS):
            bits.append(jax.random.key_data(window_keys(keys, begin, 6, role)).reshape(-1, 2))
    bits.append(jax.random.key_data(position_keys(keys, jnp.tile(jnp.arange(30), (3, 1)))).reshape(-1, 2))
    bits = np.concatenate(bits)
    assert len(np.unique(bits, axis=0)) == len(bits) == 3 * (20 * 4 * 6 + 30)


def test_keys_follow_the_documented_schedule():
    keys, start = jax.random.split(jax.random.key(5), 2), jnp.array([3, 8])
    found = window_keys(keys, start, 2, Role.RESIDUAL)
    for row, begin in enumerate([3, 8]):
        for offset in range(2):
            right = keys[row]
            for number in (int(Role.RESIDUAL), begin, offset):
                right = jax.random.fold_in(right, number)
            np.testing.assert_array_equal(jax.random.key_data(found[row, offset]), jax.random.key_data(right))
    at = position_keys(keys, jnp.array([[4, 5], [9, 4]]))
    right = jax.random.fold_in(jax.random.fold_in(keys[1], int(Role.TARGET)), 9)
    np.testing.assert_array_equal(jax.random.key_data(at[1, 0]), jax.random.key_data(right))


def test_keys_of_a_window_do_not_depend_on_its_size():
    keys, start = jax.random.split(jax.random.key(5), 2), jnp.array([3, 8])
    narrow, wide = (window_keys(keys, start, size, Role.BONUS) for size in (2, 7))
    np.testing.assert_array_equal(jax.random.key_data(narrow), jax.random.key_data(wide[:, :2]))
    assert window_keys(keys, start, 0, Role.DRAFT).shape == (2, 0)


# ---- Building the parameters ----


def test_defaults_are_greedy_and_change_nothing():
    params = sampling_params(2, max_tokens=5)
    values = {name: getattr(params, name).tolist() for name in ("temperature", "top_k", "min_p", "min_tokens")}
    assert values == {"temperature": [0, 0], "top_k": [0, 0], "min_p": [0, 0], "min_tokens": [0, 0]}
    assert params.top_p.tolist() == params.repetition_penalty.tolist() == [1, 1]
    assert params.presence_penalty.tolist() == params.frequency_penalty.tolist() == [0, 0]
    assert params.max_tokens.tolist() == [5, 5]
    assert params.stop_token_ids.tolist() == [[-1] * 4] * 2
    assert params.logit_bias is None


def test_values_may_differ_by_row():
    params = sampling_params(2, temperature=[0, 0.5], max_tokens=[3, 4], stop_token_ids=[[7], [1, 2, 3, 4, 5]])
    assert params.temperature.tolist() == [0, 0.5]
    assert params.max_tokens.tolist() == [3, 4]
    assert params.stop_token_ids.tolist() == [[7, *[-1] * 7], [1, 2, 3, 4, 5, -1, -1, -1]]
    assert sampling_params(2, max_tokens=1, stop_token_ids=[7, 8]).stop_token_ids.tolist() == [[7, 8, -1, -1]] * 2
    for ids in (np.array([7, 8]), jnp.array([[7, 8], [7, 8]])):
        assert sampling_params(2, max_tokens=1, stop_token_ids=ids).stop_token_ids.tolist() == [[7, 8, -1, -1]] * 2
    assert sampling_params(1, max_tokens=1, logit_bias=[0.0, 1.0]).logit_bias.tolist() == [[0, 1]]
    bias = jnp.arange(3.0)
    np.testing.assert_array_equal(sampling_params(2, max_tokens=1, logit_bias=bias).logit_bias, [[0, 1, 2]] * 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, r"temperature in \[0, inf\], got -0.1"),
        ("temperature", math.inf, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("top_k", -1, "top_k"),
        ("top_k", 3_000_000_000, r"top_k in \[0, 2147483647\], got 3000000000"),
        ("temperature", 10**400, r"temperature in \[0, inf\], got 1000"),
        ("temperature", 1e300, r"temperature in \[0, inf\], got 1e\+300"),
        ("top_p", 0.0, r"top_p in \(0, 1\], got 0"),
        ("top_p", 1.1, "top_p"),
        ("min_p", -0.1, "min_p"),
        ("min_p", 1.5, "min_p"),
        ("repetition_penalty", 0.0, r"repetition_penalty in \(0, inf\]"),
        ("presence_penalty", math.nan, "presence_penalty"),
        ("frequency_penalty", math.inf, "frequency_penalty"),
        ("min_tokens", -1, "min_tokens"),
        ("min_tokens", 6, "min_tokens <= max_tokens, got 6 and 5"),
        ("max_tokens", -1, "max_tokens"),
        ("temperature", [0.5, 0.5, 0.5], r"temperature to be one value or 2 \(one per row\), got \(3,\)"),
        ("temperature", [[0.1], [0.2]], r"temperature to be one value or 2 \(one per row\), got \(2, 1\)"),
        ("logit_bias", [[0.0, 1.0]] * 3, r"logit_bias \[V\] or \[2, V\], got \[3, 2\]"),
        ("stop_token_ids", [-1], "stop_token_ids >= 0"),
        ("stop_token_ids", [[1], [2], [3]], "stop_token_ids for 2 rows, got 3"),
    ],
)
def test_values_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        sampling_params(2, **{"max_tokens": 5, name: value})


def test_logit_bias_allows_forbids_and_adds():
    assert logit_bias(4).tolist() == [0] * 4
    assert logit_bias(4, bias={1: 2.5, 3: -math.inf}).tolist() == [0, 2.5, 0, -math.inf]
    assert logit_bias(4, allowed_token_ids=[0, 2], bad_token_ids=[2], bias={0: 1.0}).tolist() == [1, *[-math.inf] * 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": {4: 1.0}}, r"ids in 0..3, got \[4\]"),
        ({"bad_token_ids": [-1]}, "ids in 0..3"),
        ({"allowed_token_ids": [9]}, "ids in 0..3"),
        ({"bias": {0: math.inf}}, r"biases below \+inf"),
        ({"bias": {0: math.nan}}, r"biases below \+inf"),
        ({"allowed_token_ids": []}, "at least one id to stay allowed"),
        ({"bad_token_ids": [0, 1, 2, 3]}, "at least one id to stay allowed"),
    ],
)
def test_biases_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        logit_bias(4, **options)


def test_parameters_can_be_made_inside_a_jitted_function():
    made = jax.jit(lambda: sampling_params(2, temperature=[0.5, 1.0], min_tokens=1, max_tokens=3))()
    assert (made.temperature.tolist(), made.min_tokens.tolist()) == ([0.5, 1.0], [1, 1])
