"""Group h of the cases: 48 (rows whose logits break), 50 (ties) and 51 (near-ties and the width of the window)."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import fast_jit
from harness import ScriptedDrafter
from programs import (
    BATCH,
    NEW,
    TABLE,
    TINY,
    VERIFIERS,
    VOCAB,
    WIDTH,
    WINDOW,
    follow,
    inputs,
    rows,
    run,
    script,
    table_config,
)

from specjax.decode import DecodeConfig
from specjax.drafters.model import ModelDrafter
from specjax.types import FinishReason, Params
from specjax.verify import ExactMatch, Greedy

NAN, STOP, LENGTH = FinishReason.NAN, FinishReason.STOP, FinishReason.LENGTH
COLUMNS = WIDTH + NEW

# ---- Case 48: NaN, +inf and nothing but -inf ----

REAL = 14
"""Ids of the vocabulary that mean something; the rest is padding, as after a round-up to a multiple of 16."""
LEADS = {10: (2, 7), 11: (3, 8), 12: (4, 9), 13: (5, 6)}
"""Certain paths: token -> (next, next but one); what follows the last one is broken."""


def broken_table():
    """Tokens 0 and 1 have plain laws over each other; 7, 8, 9 and 6 have none."""
    table = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    table[:2, :2] = [[0.3, 0.0], [0.0, 0.2]]
    for start, (first, second) in LEADS.items():
        table[start, first] = table[first, second] = 0.0
    table[7, :] = np.nan
    table[8, :REAL], table[8, 3] = 0.0, np.inf
    table[6, :REAL], table[6, 13] = 0.0, np.nan
    return jnp.asarray(table)


BROKEN = broken_table()
PROMPTS = [[0], [1, 10], [0, 0, 11], [12], [13], [7], [1], [0, 6]]
"""Rows 0 and 6 are healthy, rows 5 and 7 broken from the start, the others at the third token."""
HEALTHY = [0, 6]
RIGHT = {1: [2, 7], 2: [3, 8], 3: [4, 9], 4: [5, 6], 5: [], 7: []}


def temperatures(verifier, hot):
    return [0.0] * BATCH if isinstance(verifier, Greedy) else [hot] * BATCH


@functools.cache
def plain(hot):
    return rows(run(table_config(), Params(target=BROKEN), PROMPTS, temperature=[hot] * BATCH, plain=True))


@pytest.mark.parametrize("drafted", ["nothing", "the path and on", "broken ids"])
@pytest.mark.parametrize("hot", [0.0, 1.0])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_48_broken_rows_are_flagged_and_the_others_go_on(verifier, hot, drafted):
    temperature = temperatures(verifier, hot)
    paths = {"nothing": [0], "the path and on": [0, 1, 0, 1], "broken ids": [7, 8, 9, 6]}[drafted]
    texts = [[*prompt, *RIGHT.get(row, []), *paths * 12] for row, prompt in enumerate(PROMPTS)]
    length = np.full((1, COLUMNS), 0 if drafted == "nothing" else WINDOW)
    params = Params(target=BROKEN, draft=script(texts, WINDOW, length=length))
    output = run(table_config(verifier=verifier), params, PROMPTS, temperature=temperature)
    tokens, stats = rows(output), output.stats
    assert {row: tokens[row] for row in RIGHT} == RIGHT
    assert output.finish_reason.tolist() == [LENGTH, NAN, NAN, NAN, NAN, NAN, LENGTH, NAN]
    assert stats.steps[5] == stats.steps[7] == 1
    assert (stats.accepted <= stats.drafted).all()
    assert (stats.emitted >= stats.steps - (output.finish_reason == NAN)).all()
    for row in HEALTHY:
        assert set(tokens[row]) <= {0, 1}
        assert len(tokens[row]) == NEW
    if isinstance(verifier, Greedy | ExactMatch):
        assert tokens == plain(temperature[0])


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_48_healthy_rows_are_the_same_beside_healthy_ones(verifier):
    temperature = temperatures(verifier, 1.0)
    texts = [[*prompt, *[0, 1] * 20] for prompt in PROMPTS]
    params = Params(target=BROKEN, draft=script(texts, WINDOW))
    beside = run(table_config(verifier=verifier), params, PROMPTS, temperature=temperature)
    calm = [[0], [1, 0], [0, 0, 1], [1], [0], [0], [1], [0, 1]]
    alone = run(table_config(verifier=verifier), params, calm, temperature=temperature)
    assert alone.finish_reason.tolist() == [LENGTH] * BATCH
    for row in HEALTHY:
        jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]), beside, alone)


def test_case_48_a_drafter_whose_law_breaks_stands_down():
    """The draft model has no law after token 1: the window ends there, and the text is the target's."""
    drafter = ModelDrafter(model=TABLE, num_tokens=WINDOW, vocab_size=VOCAB)
    target = jnp.nan_to_num(BROKEN, nan=0.0, posinf=0.0, neginf=-jnp.inf)
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        params = Params(target=target, draft=target.at[1].set(value))
        prompts = [[0], [1], [0], [1]]
        output = run(table_config(drafter), params, prompts, temperature=[0.0, 0.0, 1.0, 1.0])
        assert rows(output) == rows(run(table_config(), params, prompts, temperature=[0.0, 0.0, 1.0, 1.0], plain=True))
        assert output.finish_reason[:4].tolist() == [LENGTH] * 4
        follows_one = sum(token == 1 for row in rows(output)[2:4] for token in row)
        assert 0 < output.stats.drafted[2:4].sum() < WINDOW * (2 * NEW - follows_one)


# ---- The real transformer. One program: its branches verify 0, 1, 2, 4 and 8 drafted tokens ----

WIDEST = ScriptedDrafter(num_tokens=8)
WINDOWED = DecodeConfig(target=TINY, drafter=WIDEST, verifier=ExactMatch(), windows=(0, 1, 2, 4, 8))
MIXED = [0.0, 1.0] * (BATCH // 2)


def prompts_of(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY.vocab_size, rng.integers(2, WIDTH + 1)).tolist() for _ in range(BATCH)]


def run_tiny(params, prompts, **options):
    with jax.default_matmul_precision("highest"):
        return run(WINDOWED, params, prompts, temperature=MIXED, **options)


def plain_tiny(params, prompts, seeds=0):
    return rows(run_tiny(Params(target=params), prompts, seeds=seeds, plain=True))


@functools.cache
def poisoned():
    """Prompts, the target's text, a token that occurs in neither, and params in which its embedding is NaN."""
    params, prompts = harness.tiny_params(5), prompts_of(1)
    right = plain_tiny(params, prompts)
    poison = min(set(range(TINY.vocab_size)).difference(*prompts, *right))
    return prompts, right, poison, params | {"embed": params["embed"].at[poison].set(jnp.nan)}


def poisoned_params(place, every):
    """The right text as draft, but with the NaN token at one place of each window; drafted at every n-th length."""
    prompts, right, poison, params = poisoned()
    length = np.where(np.arange(COLUMNS) % every == 0, 4, 0)
    draft = script([[*prompt, *row] for prompt, row in zip(prompts, right, strict=True)], 8, length=length[None])
    return Params(target=params, draft=draft.replace(tokens=draft.tokens.at[:, :, place].set(poison)))


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 3])
def test_case_48_a_rejected_nan_leaves_nothing_behind(place, every):
    """Its slot lies stale while the row takes steps without a draft, and is overwritten later: 0 * NaN is NaN."""
    prompts, right, *_ = poisoned()
    output = run_tiny(poisoned_params(place, every), prompts)
    assert rows(output) == right
    assert output.finish_reason.tolist() == [LENGTH] * BATCH
    assert (output.stats.drafted_per_position[:, place] > 2).all()
    assert (output.stats.accepted_per_position[:, :place] > 0).all()
    assert not output.stats.accepted_per_position[:, place].any()


@pytest.mark.parametrize("place", [0, 4, -1])
def test_case_48_a_nan_in_the_text_flags_its_row_alone(place):
    """As pending token, in the prefill, and as the first of it: nothing is emitted, and the other rows go on."""
    prompts, right, poison, _ = poisoned()
    spoilt = [list(prompt) for prompt in prompts]
    spoilt[3] = [*range(10)]
    spoilt[3][place] = poison
    output = run_tiny(poisoned_params(7, 1), spoilt)
    assert output.finish_reason.tolist() == [LENGTH] * 3 + [NAN] + [LENGTH] * 4
    assert rows(output) == [*right[:3], [], *right[4:]]


# ---- Case 50: ties ----


def tied_table(*ids):
    """Every row has its maximum at the ids; all values are bfloat16 numbers."""
    table = np.random.default_rng(2).normal(size=(VOCAB, VOCAB)).astype(jnp.bfloat16).astype(np.float32)
    table[:, ids] = 4.0
    return jnp.asarray(table)


TIES = [(2, 5), (5, 14, 9), tuple(range(VOCAB))]
CERTAIN = {
    "temperature": [0.0, 0.0, 1.0, 1.0, 0.5],
    "top_k": [0, 4, 1, 1, 1],
    "top_p": [1.0, 0.3, 1.0, 1e-6, 0.2],
    "min_p": [0.0, 0.0, 0.0, 0.0, 1.0],
}
"""Rows that leave no choice: temperature 0, and a support of one token."""
STARTS = [[3], [2, 5], [5], [7, 5], [0]]


@pytest.mark.parametrize("ids", TIES)
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_50_the_lowest_id_wins_everywhere(verifier, window, ids):
    """Plain steps and windows that propose the other tied ids first: always the lowest."""
    count = 2 if isinstance(verifier, Greedy) else 5
    sampling = {name: values[:count] for name, values in CERTAIN.items()}
    texts = [[*start, *([max(ids)] * 3 + [min(ids)] * 4) * 8] for start in STARTS[:count]]
    params = Params(target=tied_table(*ids), draft=script(texts, WINDOW, length=np.full((1, COLUMNS), window)))
    output = run(table_config(verifier=verifier), params, STARTS[:count], **sampling)
    assert rows(output)[:count] == [[min(ids)] * NEW] * count
    if window and min(ids) != max(ids):
        assert (output.stats.accepted[:count] > 0).all()
        assert (output.stats.accepted[:count] < output.stats.drafted[:count]).all()


@pytest.mark.parametrize("ids", TIES)
def test_case_50_the_drafter_breaks_ties_like_the_target(ids):
    """A draft model with the target's table proposes the same id of equals: all of it is kept."""
    drafter = ModelDrafter(model=TABLE, num_tokens=WINDOW, vocab_size=VOCAB)
    params = Params(target=tied_table(*ids), draft=tied_table(*ids))
    output = run(table_config(drafter), params, STARTS, **CERTAIN)
    assert rows(output)[:5] == [[min(ids)] * NEW] * 5
    assert output.stats.accepted.tolist() == output.stats.drafted.tolist() == [26] * 5 + [0] * 3


def test_case_50_without_speculation():
    params = Params(target=tied_table(2, 5))
    assert rows(run(table_config(), params, STARTS, plain=True, **CERTAIN))[:5] == [[2] * NEW] * 5
    assert follow(params.target, 3) == [2] * NEW


# ---- Case 51: near-ties and the width of the window ----


def flawed_script(prompts, right, seed, window):
    """The right text with every seventh token or so wrong, at most `window` of them at a time."""
    rng, texts = np.random.default_rng(seed), []
    for prompt, row in zip(prompts, right, strict=True):
        wrong = rng.random(len(row)) < 0.15
        texts.append([*prompt, *((np.array(row) + wrong) % TINY.vocab_size)])
    return script(texts, 8, length=np.full((1, COLUMNS), window))


@pytest.mark.parametrize("model", range(7))
def test_case_51_float32_tokens_do_not_depend_on_the_window(model):
    """56 seeds, greedy and sampled rows, windows of 1, 2, 4 and 8 verified at their own width: equal to K = 0."""
    params, prompts = harness.tiny_params(model), prompts_of(model)
    right = plain_tiny(params, prompts, seeds=BATCH * model)
    for window in (1, 2, 4, 8):
        draft = flawed_script(prompts, right, model, window)
        output = run_tiny(Params(target=params, draft=draft), prompts, seeds=BATCH * model)
        assert rows(output) == right
        assert 0.4 < output.stats.accepted.sum() / output.stats.drafted.sum() < 1


def test_case_51_bfloat16_tokens_are_near_ties_at_worst():
    """Teacher-forced through the plain path, each chosen token is within two bfloat16 steps of the maximum."""
    params, prompts = harness.tiny_params(0, dtype=jnp.bfloat16), prompts_of(0)
    config = DecodeConfig(target=TINY, drafter=ScriptedDrafter(num_tokens=4), verifier=Greedy())
    draft = flawed_script(prompts, plain_steps(params, prompts)[0].tolist(), 0, 4)
    output = run(config, Params(target=params, draft=draft.replace(tokens=draft.tokens[..., :4])), prompts)
    accepted, drafted = int(output.stats.accepted.sum()), int(output.stats.drafted.sum())
    assert min(accepted, drafted - accepted) > 100  # rows that took the other side of a tie keep few of the rest
    _, logits = plain_steps(params, prompts, forced=output.tokens)
    chosen = np.take_along_axis(logits, np.asarray(output.tokens)[..., None], axis=-1)[..., 0]
    second, best = np.moveaxis(np.sort(logits, axis=-1)[..., -2:], -1, 0)
    steps = 2.0 ** (np.floor(np.log2(np.abs(best))) - 7)
    assert (chosen >= best - 2 * steps).all()
    assert (second < best - 2 * steps).mean() > 0.5


def plain_steps(params, prompts, forced=None):
    """Tokens `[B, NEW]` and the logits `[B, NEW, V]` before each, one a call: the forced ones, or the argmax."""
    _, prompt, length = inputs(prompts)
    positions = jnp.where(jnp.arange(WIDTH) < length[:, None] - 1, jnp.arange(WIDTH), -1)
    _, cache = APPLY(params, prompt, positions, TINY.init_cache(params, BATCH, COLUMNS))
    token, tokens, logits = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1), [], []
    for index in range(NEW):
        output, cache = APPLY(params, token, length[:, None] - 1 + index, cache)
        token = jnp.argmax(output.logits, axis=-1) if forced is None else forced[:, index : index + 1]
        tokens.append(np.asarray(token))
        logits.append(np.asarray(output.logits))
    return np.concatenate(tokens, axis=1), np.concatenate(logits, axis=1)


APPLY = fast_jit(TINY.apply)
