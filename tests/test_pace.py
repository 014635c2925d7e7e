"""When rows speculate: the rule alone, and its effect on decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import begin
from harness import ScriptedDrafter
from programs import (
    BATCH,
    NEW,
    TABLE,
    VOCAB,
    WIDTH,
    WINDOW,
    inputs,
    rows,
    run,
    sampling_rows,
    script,
    table_config,
)

from specjax.compiled import draft_step
from specjax.decode import DecodeConfig
from specjax.pace import CURIOSITY, GRADES, MEMORY, PRIOR, best_window, init_pace, make_pace, update_pace
from specjax.types import Draft, Params
from specjax.verify import ExactMatch, Greedy

WINDOWS = (0, 2, 6)


@functools.partial(jax.jit, static_argnums=2)
def decide(pace, draft, windows, text=1):
    """Which drafts are kept whole."""
    return draft.length <= best_window(pace, text + 0 * draft.length, draft.length, draft.evidence, windows)


@jax.jit
def learn(pace, draft, num_accepted):
    return update_pace(pace, jnp.ones(len(draft.length), bool), draft, num_accepted)


def draft_of(lengths, grades=None):
    lengths = jnp.asarray(lengths, jnp.int32)
    evidence = None if grades is None else jnp.asarray(grades, jnp.int32)
    return Draft(tokens=jnp.zeros((len(lengths), 6), jnp.int32), length=lengths, evidence=evidence)


def expected_tokens(rate, length):
    """1 + a + ... + a^n, as a sum."""
    return sum(rate**index for index in range(length + 1))


# ---- The rule ----


@pytest.mark.parametrize("grade", range(GRADES))
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_draft_pays_up_to_its_expected_tokens(grade, length):
    """Held against the cost of the smallest window that holds it, in units of a plain step."""
    worth = expected_tokens(PRIOR[grade], length)
    for factor, right in ((0.999, True), (1.001, False)):
        costs = np.array([5.0, 999.0, 999.0])
        costs[np.searchsorted(WINDOWS, length)] = 5.0 * worth * factor
        pace, draft = make_pace(1, jnp.asarray(costs)), draft_of([length], [grade])
        assert decide(pace, draft, WINDOWS).tolist() == [right]


def test_drafts_without_evidence_are_credited_with_the_best_grade_and_count_for_all():
    pace = init_pace(2, 3).replace(acceptance=jnp.full((2, GRADES), 0.0).at[:, 2].set(0.5))
    pace = pace.replace(costs=make_pace(2, [1.0, 1.4, 9.0]).costs)
    assert decide(pace, draft_of([1, 2]), WINDOWS).tolist() == [True, True]
    assert decide(pace, draft_of([1, 2], [0, 1]), WINDOWS).tolist() == [False, False]
    after = learn(pace, draft_of([1, 1]), jnp.array([1, 0])).acceptance
    right = [[1 / MEMORY, 1 / MEMORY, 0.5 + 0.5 / MEMORY, 1 / MEMORY], [0, 0, 0.5 - 0.5 / MEMORY, 0]]
    np.testing.assert_allclose(after, right, rtol=1e-6)


def test_equal_costs_always_speculate_and_no_draft_is_a_plain_step():
    """Even at an acceptance of 0; and nothing drafted costs what a plain step costs."""
    hopeless = init_pace(3, 3).replace(acceptance=jnp.zeros((3, GRADES)))
    assert decide(hopeless, draft_of([1, 3, 6]), WINDOWS).tolist() == [True] * 3
    dear = make_pace(1, jnp.array([1.0, 1e9, 1e9]))
    nothing = draft_of([0])
    assert best_window(dear, jnp.array([1]), nothing.length, nothing.evidence, WINDOWS) == 0


def test_a_perfect_record_is_worth_nearly_the_whole_window():
    perfect = init_pace(1, 3).replace(acceptance=jnp.ones((1, GRADES)))
    for cost, right in ((expected_tokens(0.99, 6) - 0.01, True), (7.0, False)):
        pace = perfect.replace(costs=make_pace(1, [1.0, 999.0, cost]).costs)
        assert decide(pace, draft_of([6]), WINDOWS).tolist() == [right]


@pytest.mark.parametrize(
    ("length", "accepted", "observed", "judged"),
    [
        (1, 1, 1.0, 1),
        (1, 0, 0.0, 1),
        (6, 0, 0.0, 1),
        (6, 2, 2 / 3, 3),
        (6, 5, 5 / 6, 6),
        (6, 6, 1.0, 6),
        (4, 3, 3 / 4, 4),
    ],
)
def test_history_counts_the_tokens_that_were_judged(length, accepted, observed, judged):
    """What follows the first rejection was not judged; the draft's own grade learns, the others stay."""
    for grade in range(GRADES):
        after = learn(init_pace(1, 3), draft_of([length], [grade]), jnp.array([accepted])).acceptance[0]
        right = list(PRIOR)
        right[grade] += (observed - right[grade]) * (1 - (1 - 1 / MEMORY) ** judged)
        np.testing.assert_allclose(after, right, rtol=1e-6)


def test_curiosity_brings_a_row_back():
    """Every step without a draft forgets a share of all grades; one that paid at the prior is tried again in time."""
    pace, draft = make_pace(1, jnp.array([1.0, 999.0, 2.0])), draft_of([6])
    for _ in range(10):
        pace = learn(pace, draft, jnp.array([0]))
    low, rests = pace.acceptance, 0
    while rests < 100 and not decide(pace, draft, WINDOWS)[0]:
        pace, rests = learn(pace, draft_of([0]), jnp.array([0])), rests + 1
    prior = np.array(PRIOR)
    np.testing.assert_allclose(pace.acceptance, prior + (low - prior) * (1 - CURIOSITY) ** rests, rtol=1e-5)
    assert expected_tokens(float(low[0].max()), 6) < 2 <= expected_tokens(float(pace.acceptance[0].max()), 6)
    assert 20 < rests < 60


def test_a_row_that_is_done_learns_nothing():
    pace, draft = init_pace(2, 3), draft_of([4, 0])
    after = update_pace(pace, jnp.array([False, False]), draft, jnp.array([4, 0]))
    np.testing.assert_array_equal(after.acceptance, pace.acceptance)


@pytest.mark.parametrize(
    "costs", [[1.0, 0.0], [1.0, -2.0], [1.0, np.nan], [np.inf, 1.0], [[1.0, 2.0, 3.0]], [[1.0, -0.1]], 1.0]
)
def test_costs_must_be_numbers_above_zero(costs):
    with pytest.raises(ValueError, match="costs"):
        make_pace(2, costs)


def test_rows_learn_apart():
    """A batch is its rows."""
    lengths, grades, accepted = np.array([0, 1, 4, 6]), np.array([3, 0, 2, 1]), np.array([0, 1, 1, 6])
    pace = make_pace(4, jnp.array([1.0, 1.5, 2.0]))
    pace = pace.replace(acceptance=jnp.asarray(np.random.default_rng(0).uniform(size=(4, GRADES)), jnp.float32))
    together = learn(pace, draft_of(lengths, grades), jnp.asarray(accepted)).acceptance
    for row in range(4):
        alone = pace.replace(acceptance=pace.acceptance[row : row + 1])
        draft = draft_of(lengths[row : row + 1], grades[row : row + 1])
        np.testing.assert_array_equal(
            learn(alone, draft, jnp.asarray(accepted[row : row + 1])).acceptance[0], together[row]
        )


def tokens_per_time(pace, grades, text, lengths):
    """Of a step in which drafts of these lengths are verified, in the smallest window that holds them."""
    rates = np.asarray(pace.acceptance)[np.arange(len(lengths)), grades]
    tokens = sum(expected_tokens(*row) for *row, alive in zip(rates, lengths, text, strict=True) if alive)
    return tokens / (np.asarray(pace.costs)[np.searchsorted(WINDOWS, max(lengths))] @ [1, max(text)])


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_of_drafts_is_faster(seed):
    """Of all ways to cut each of three drafts, some of them empty or of rows that are done."""
    draw = np.random.default_rng(seed)
    length, grades = draw.integers(0, 7, size=3), draw.integers(0, GRADES, size=3)
    text = np.where(draw.random(3) < 0.8, draw.integers(1, 9, size=3), 0)
    length = np.where(text > 0, length, 0)
    pace = make_pace(3, np.cumsum(draw.uniform(0.5, 1.5, size=(3, 2)), axis=0) * [1, 0.2])
    pace = pace.replace(acceptance=jnp.asarray(draw.uniform(0, 0.95, size=(3, GRADES)), jnp.float32))
    cut = np.minimum(length, best_window(pace, jnp.asarray(text), jnp.asarray(length), jnp.asarray(grades), WINDOWS))
    choices = itertools.product(*[range(most + 1) for most in length])
    fastest = max(tokens_per_time(pace, grades, text, choice) for choice in choices)
    np.testing.assert_allclose(tokens_per_time(pace, grades, text, cut), fastest, rtol=1e-5)


def test_one_good_draft_is_not_worth_the_time_of_many_rows():
    """At twice the cost it pays beside three rows that are done, not beside three that would wait for it."""
    pace, draft = make_pace(4, [1.0, 2.0, 2.0]), draft_of([6, 0, 0, 0], [GRADES - 1] * 4)
    for text, right in (([1, 1, 1, 1], False), ([1, 0, 0, 0], True)):
        assert bool(decide(pace, draft, WINDOWS, np.array(text))[0]) == right


@pytest.mark.parametrize(("text", "pay"), [([1, 1], False), ([4, 4], False), ([6, 1], True), ([1, 6], True)])
def test_a_window_may_pay_over_long_texts_alone(text, pay):
    """A wide step takes 1.6 plain ones over 6 tokens and more over fewer; the longest text decides, not their mean.

    3 tokens at an acceptance of .3 are 1.417 expected, and of .55 2.012: together 1.714 plain steps.
    """
    pace, draft = make_pace(2, [[1.0, 1.0], [6.0, 1.0], [5.2, 1.0]]), draft_of([3, 3], [0, 1])
    assert decide(pace, draft, WINDOWS, np.array(text)).tolist() == [pay] * 2


# ---- Its effect ----

PARAMS = Params(target=jnp.asarray(np.random.default_rng(1).normal(scale=2.0, size=(VOCAB, VOCAB)), jnp.float32))
PROMPTS = [[3], [1, 2], [7, 7, 7], [0, 5]]
CASES = [(ExactMatch(), 1.0), (Greedy(), 0.0)]


@functools.cache
def plain(hot, seeds=0):
    return rows(run(table_config(), PARAMS, PROMPTS, seeds=seeds, temperature=hot, plain=True))


def right_drafts(hot):
    return [[*prompt, *row] for prompt, row in zip(PROMPTS, plain(hot), strict=False)]


def wrong_drafts(hot, count=NEW):
    """Wrong for the first `count` tokens of the output, right from then on."""
    shift = np.arange(WIDTH + NEW)
    return [
        [
            (token + (len(prompt) <= index < len(prompt) + count)) % VOCAB
            for index, token in zip(shift, text, strict=False)
        ]
        for prompt, text in zip(PROMPTS, right_drafts(hot), strict=True)
    ]


def decode(verifier, hot, texts, cost, **options):
    params = PARAMS.replace(draft=script(texts, WINDOW))
    pace = None if cost is None else make_pace(BATCH, jnp.array([1.0, cost]))
    return run(table_config(verifier=verifier), params, PROMPTS, temperature=hot, pace=pace, **options)


@pytest.mark.parametrize(("verifier", "hot"), CASES)
@pytest.mark.parametrize("drafts", [right_drafts, wrong_drafts])
def test_costs_of_one_always_speculate(verifier, hot, drafts):
    """The same run, counter for counter, as without costs."""
    output, right = decode(verifier, hot, drafts(hot), 1.0), decode(verifier, hot, drafts(hot), None)
    jax.tree.map(np.testing.assert_array_equal, output, right)
    assert (output.stats.drafted[:4] >= 26).all()


@pytest.mark.parametrize(("verifier", "hot"), CASES)
@pytest.mark.parametrize("cost", [3.7, 1e9])
def test_costs_that_never_pay_give_plain_decoding(verifier, hot, cost):
    """At 5 tokens and the best prior of 0.8 a window is worth 3.69 plain steps: not even right drafts are verified."""
    output = decode(verifier, hot, right_drafts(hot), cost)
    assert rows(output) == plain(hot)
    assert output.stats.drafted.tolist() == [0] * BATCH
    assert output.stats.steps.tolist() == output.stats.emitted.tolist() == [NEW] * 4 + [0] * 4


@pytest.mark.parametrize(("verifier", "hot"), CASES)
def test_a_row_stands_down_and_comes_back(verifier, hot):
    """Ten wrong tokens at twice the cost: a few windows, then plain steps, then the drafts that have become right."""
    output = decode(verifier, hot, wrong_drafts(hot, 10), 2.0)
    always = decode(verifier, hot, wrong_drafts(hot, 10), 1.0)
    assert rows(output) == plain(hot)
    assert (output.stats.steps > always.stats.steps)[:4].all()
    assert (output.stats.drafted < always.stats.drafted)[:4].all()
    assert (output.stats.accepted > 0)[:4].all()


@pytest.mark.parametrize(("verifier", "hot"), CASES)
def test_a_row_speculates_once_its_text_is_long_enough(verifier, hot):
    """A window over n tokens takes (16 + n) / (1 + n) plain steps: less than its promised 3.69 from n = 5 on."""
    params = PARAMS.replace(draft=script(right_drafts(hot), WINDOW))
    pace = make_pace(BATCH, jnp.array([[1.0, 1.0], [16.0, 1.0]]))
    for row, prompt in enumerate(PROMPTS[:3]):
        alone = [prompt if index == row else [] for index in range(len(PROMPTS))]
        output = run(table_config(verifier=verifier), params, alone, temperature=hot, pace=pace)
        assert rows(output)[row] == plain(hot)[row]
        num_plain = 5 - len(prompt)
        assert output.stats.steps[row] == num_plain + -(-(NEW - num_plain) // (WINDOW + 1))


@pytest.mark.parametrize(("verifier", "hot"), CASES)
@pytest.mark.parametrize(("num_right", "speculates"), [(4, True), (3, True), (1, False)])
def test_a_batch_speculates_as_long_as_its_rows_together_gain(verifier, hot, num_right, speculates):
    """Right drafts in some rows, at 3.5 times the cost.

    All try once: at the best prior a window is worth 3.69 plain steps. With three of four rows right they go on, at up
    to 5.9 tokens a window for each. One row's 5.9 and 3 beside it are fewer than the 14 of plain steps in the same
    time. Whatever is decided, no token hangs on it.
    """
    texts = [*right_drafts(hot)[:num_right], *wrong_drafts(hot)[num_right:]]
    output = decode(verifier, hot, texts, 3.5)
    assert rows(output) == plain(hot)
    accepted = np.asarray(output.stats.accepted[:num_right])
    assert (accepted >= 25).all() if speculates else (accepted == 5).all()


def test_a_window_is_chosen_for_the_drafts_that_came():
    """Of three windows the widest, for the one row that has a draft; the middle one, if the other had one as well.

    Together they would expect 4.46 tokens from 2 each, in a plain step's time, and 7.2 from 6 each, in 1.65 of it. The
    one alone expects 3.71 from 2 and 6.22 from 6.
    """
    drafter = ScriptedDrafter(num_tokens=6)
    config = DecodeConfig(target=TABLE, drafter=drafter, verifier=Greedy(), windows=WINDOWS)
    pace = make_pace(BATCH, [1.0, 1.0, 1.65])
    pace = pace.replace(acceptance=jnp.full((BATCH, GRADES), 0.9).at[1].set(0.5))
    for second, right in ((0, [6, 0]), (6, [2, 2])):
        lengths = jnp.zeros((BATCH, 1), jnp.int32).at[:2, 0].set(jnp.array([6, second]))
        params = PARAMS.replace(draft=script(PROMPTS[:2], 6, length=lengths))
        arguments = *inputs(PROMPTS[:2]), sampling_rows(2), pace
        state = begin(params, *arguments, config=config, max_new_tokens=NEW)
        assert draft_step(params, state, arguments[3], config=config)[1].length[:2].tolist() == right
