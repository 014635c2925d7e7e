import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from specjax.testing.models import (
    ContraryDrafter,
    HistoryModel,
    OracleDrafter,
    Script,
    ScriptedDrafter,
    SelfDrafter,
    TableDrafter,
    TableModel,
    history_params,
    script_of,
)
from specjax.types import Context, Params, SamplingParams

HISTORY, SALT = HistoryModel(vocab_size=11), history_params(7)
apply_history = jax.jit(HISTORY.apply)
TEXT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [10, 0, 10, 0, 0, 7, 7, 7]], jnp.int32)


def run(model, params, tokens, capacity, cuts):
    """Logits of all tokens, fed in pieces that end at `cuts`."""
    cache, pieces = model.init_cache(params, len(tokens), capacity), []
    apply = jax.jit(model.apply)
    for start, end in zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True):
        positions = jnp.broadcast_to(jnp.arange(start, end), (len(tokens), end - start))
        output, cache = apply(params, tokens[:, start:end], positions, cache)
        pieces.append(output.logits)
    return np.concatenate(pieces, axis=1)


# ---- Targets ----


def test_table_model_looks_rows_up():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(11, 11)).astype(jnp.bfloat16))
    logits = run(TableModel(vocab_size=11), table, TEXT, 8, (3,))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, np.asarray(table)[np.asarray(TEXT)].astype(np.float32))


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3, 4, 5, 6, 7), (5,)])
def test_history_model_equals_its_numpy_mirror_however_text_is_cut(cuts):
    logits = run(HISTORY, SALT, TEXT, 8, cuts)
    for row, text in enumerate(np.asarray(TEXT)):
        for end in range(1, 9):
            np.testing.assert_array_equal(logits[row, end - 1], HISTORY.logits_after(SALT, text[:end]))


def test_history_model_depends_on_every_token_its_place_and_the_salt():
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    variants = [[*text[:i], (x + 1) % 11, *text[i + 1 :]] for i, x in enumerate(text)]
    variants += [text, text[1:], [1, 3, *text[2:]], [*text, 0]]
    laws = {HISTORY.logits_after(SALT, variant).tobytes() for variant in variants}
    laws.add(HISTORY.logits_after(history_params(8), text).tobytes())
    assert len(laws) == len(variants) + 1


def test_history_model_has_varied_laws():
    logits = np.stack([HISTORY.logits_after(SALT, [i % 11, i // 11]) for i in range(121)])
    assert logits.min() >= 0
    assert logits.max() < HISTORY.scale
    assert logits.mean() == pytest.approx(2, abs=0.1)
    choices = np.bincount(logits.argmax(axis=-1), minlength=11)
    assert choices.min() >= 3


def test_history_cache_is_addressed_by_slot_and_stale_slots_are_not_read():
    """A rejected draft leaves stale slots; the next call overwrites some and must not see the rest."""
    cache = HISTORY.init_cache(SALT, 2, 8)
    _, cache = apply_history(SALT, TEXT[:, :4], jnp.tile(jnp.arange(4), (2, 1)), cache)
    _, cache = apply_history(SALT, jnp.full((2, 4), 8), jnp.tile(jnp.arange(4, 8), (2, 1)), cache)
    output, cache = apply_history(SALT, TEXT[:, 4:6], jnp.tile(jnp.arange(4, 6), (2, 1)), cache)
    assert cache.keys[0][0, 0, :, 0].tolist() == [3, 1, 4, 1, 5, 9, 8, 8]
    assert cache.length.tolist() == [0, 0]
    for row, text in enumerate(np.asarray(TEXT)):
        np.testing.assert_array_equal(output.logits[row, 1], HISTORY.logits_after(SALT, text[:6]))


def test_history_cache_mistakes_show():
    """A hole, a row written one slot too far, and a stale token each change the law."""
    right = HISTORY.logits_after(SALT, [3, 1, 4])
    start = HISTORY.init_cache(SALT, 1, 8)

    def at(tokens, positions, cache):
        return apply_history(SALT, jnp.array([tokens]), jnp.array([positions]), cache)

    hole = at([4], [2], at([3], [0], start)[1])[0]
    shifted = at([3, 1, 4], [1, 2, 3], start)[0]
    stale = at([4], [2], at([3, 2], [0, 1], start)[1])[0]
    fine = at([4], [2], at([3, 1], [0, 1], start)[1])[0]
    same = [np.array_equal(output.logits[0, -1], right) for output in (hole, shifted, stale, fine)]
    assert same == [False, False, False, True]


def test_history_padding_is_neither_written_nor_seen_and_rows_are_independent():
    cache = HISTORY.init_cache(SALT, 2, 8)
    positions = jnp.array([[0, 1, 2, 3], [0, 1, -1, -1]])
    output, cache = apply_history(SALT, TEXT[:, :4], positions, cache)
    assert cache.keys[0][1, 0, :, 0].tolist() == [10, 0, -1, -1, -1, -1, -1, -1]
    assert cache.values[0][1, 0, :, 0].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    np.testing.assert_array_equal(output.logits[0, 3], HISTORY.logits_after(SALT, [3, 1, 4, 1]))
    np.testing.assert_array_equal(output.logits[1, 1], HISTORY.logits_after(SALT, [10, 0]))


def test_history_writes_past_the_capacity_are_lost_not_clamped():
    cache = HISTORY.init_cache(SALT, 1, 4)
    _, cache = apply_history(SALT, TEXT[:1], jnp.arange(8)[None], cache)
    assert cache.keys[0][0, 0, :, 0].tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize(("model", "params"), [(HISTORY, SALT), (TableModel(vocab_size=11), jnp.zeros((11, 11)))])
def test_output_at_padding_is_certain_of_the_last_token(model, params):
    output, _ = model.apply(params, TEXT, jnp.full(TEXT.shape, -1), model.init_cache(params, 2, 8))
    assert reference.softmax(np.asarray(output.logits))[..., -1].min() > 0.999


def test_strategies_hash_by_value():
    for make in (
        lambda: HistoryModel(vocab_size=5),
        lambda: TableModel(vocab_size=5),
        lambda: SelfDrafter(num_tokens=2),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())


# ---- Drafters ----


def propose(drafter, params, texts, *, temperature=1.0, keys=None):
    """Drafts once for ragged texts, under jit, through all three methods."""
    length = jnp.asarray(np.array([len(text) for text in texts], np.int32))
    tokens = jnp.asarray(np.array([[*text, *[-1] * (12 - len(text))] for text in texts], np.int32))
    context = Context(tokens=tokens, length=length, prompt_length=length)
    if keys is None:
        keys = jax.random.split(jax.random.key(0), (len(texts), drafter.num_tokens))
    sampling = plain_sampling(len(texts), temperature)
    state = drafter.update(params, drafter.init(params, len(texts), 12), tokens, tokens, None)
    return jax.jit(drafter.draft)(params, keys, state, context, sampling, None)[0]


def plain_sampling(batch, temperature):
    zeros, ints = np.zeros(batch, np.float32), np.zeros(batch, np.int32)
    return SamplingParams(
        temperature=zeros + np.float32(temperature),
        top_k=ints,
        top_p=zeros + 1,
        min_p=zeros,
        repetition_penalty=zeros + 1,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        min_tokens=ints,
        max_tokens=ints + 9,
        stop_token_ids=ints[:, None] - 1,
    )


TABLE = np.array(
    [[0.0, 3.0, 1.0, 2.0], [1.0, 0.0, 2.0, 3.0], [2.0, 1.0, 0.0, 0.5], [1.0, 2.0, 3.0, -np.inf]], np.float32
)


def test_oracle_follows_the_greedy_path():
    draft = propose(OracleDrafter(num_tokens=3), Params(target=TABLE), [[2, 0], [1]])
    assert draft.tokens.tolist() == [[1, 3, 2], [3, 2, 0]]
    assert draft.length.tolist() == [3, 3]
    assert draft.log_probs is None


def test_contrary_drafter_never_proposes_the_argmax():
    draft = propose(ContraryDrafter(num_tokens=3), Params(target=TABLE), [[2, 0], [3]])
    assert draft.tokens.tolist() == [[0, 0, 0], [3, 3, 3]]
    flat = propose(ContraryDrafter(num_tokens=2), Params(target=jnp.zeros((4, 4))), [[2]])
    assert flat.tokens.tolist() == [[3, 3]]


@pytest.mark.parametrize(
    "drafter", [OracleDrafter(num_tokens=0), ContraryDrafter(num_tokens=0), SelfDrafter(num_tokens=0)]
)
def test_empty_window(drafter):
    draft = propose(drafter, Params(target=TABLE), [[2, 0], [3]])
    assert draft.tokens.shape == (2, 0)
    assert draft.length.tolist() == [0, 0]


def test_script_of_a_text():
    script = script_of(jnp.array([[5, 6, 7, 8, 9]]), 3, filler=-1)
    assert script.tokens[0].tolist() == [[5, 6, 7], [6, 7, 8], [7, 8, 9], [8, 9, -1], [9, -1, -1]]
    assert script.length.tolist() == [[3, 3, 3, 2, 1]]
    assert script_of(jnp.array([[5, 6]]), 0).tokens.shape == (1, 2, 0)


def test_scripted_drafter_reads_the_script_by_row_and_length():
    script = script_of(jnp.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]), 2)
    draft = propose(ScriptedDrafter(num_tokens=2), Params(target=None, draft=script), [[1], [9, 8, 7, 6]])
    assert draft.tokens.tolist() == [[2, 3], [5, -1]]
    assert draft.length.tolist() == [2, 1]
    assert draft.log_probs is None
    past = propose(ScriptedDrafter(num_tokens=2), Params(target=None, draft=script), [[0] * 5, [0] * 9])
    assert past.length.tolist() == [0, 0]


def test_scripted_drafter_reports_the_scripted_law():
    log_probs = np.random.default_rng(1).normal(size=(2, 3, 2, 4)).astype(np.float32)
    zeros = np.zeros((2, 3, 2), np.int32)
    script = jax.tree.map(jnp.asarray, Script(tokens=zeros, length=zeros[..., 0] + 2, log_probs=log_probs))
    draft = propose(ScriptedDrafter(num_tokens=2), Params(target=None, draft=script), [[0], [0, 0]])
    np.testing.assert_array_equal(draft.log_probs, np.stack([log_probs[0, 1], log_probs[1, 2]]))


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (SelfDrafter(num_tokens=2), Params(target=TABLE)),
        (TableDrafter(num_tokens=2), Params(target=TABLE[::-1], draft=TABLE)),
    ],
)
def test_sampling_drafters_draw_from_the_law_they_report(drafter, params):
    draft = propose(drafter, params, [[3, 0]] * 20_000, temperature=0.8)
    probs = np.exp(np.asarray(draft.log_probs, np.float64))
    table = reference.softmax(np.asarray(TABLE, np.float64) / 0.8)
    first, second = np.asarray(draft.tokens).T
    assert draft.log_probs.dtype == jnp.float32
    np.testing.assert_allclose(probs[:, 0], np.broadcast_to(table[0], (20_000, 4)), rtol=2e-6)
    np.testing.assert_allclose(probs[:, 1], table[first], rtol=2e-6)
    counts = np.bincount(first * 4 + second, minlength=16)
    assert reference.g_test(counts, (table[0][:, None] * table).ravel()) > 1e-4


def test_sampled_tokens_use_one_key_each():
    keys = jax.random.split(jax.random.key(1), (64, 2))
    drafter, params = SelfDrafter(num_tokens=2), Params(target=jnp.zeros((4, 4)))
    first, second = (propose(drafter, params, [[3, 0]] * 64, keys=keys[:, order]).tokens for order in ([0, 1], [1, 0]))
    expected = jax.jit(jax.vmap(jax.vmap(lambda key: jax.random.categorical(key, jnp.zeros(4), mode="high"))))(keys)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, first[:, ::-1])


def test_cold_sampling_drafter_is_certain_of_the_argmax():
    draft = propose(SelfDrafter(num_tokens=2), Params(target=TABLE), [[3, 0]], temperature=0.0)
    assert draft.tokens.tolist() == [[1, 3]]
    assert np.exp(draft.log_probs).tolist() == [[[0, 1, 0, 0], [0, 0, 0, 1]]]
