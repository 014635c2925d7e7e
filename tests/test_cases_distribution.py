"""Cases of group (a), public bug reports where the distribution changed; each is one example of a kind."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import begin, fast_jit, propose
from harness import TableModel, tiny_config, tiny_params
from many_rows import (
    BY_MODEL,
    GROUPS,
    KEY,
    LIMIT,
    NEW,
    RULES,
    TABLE,
    K,
    V,
    alike,
    assert_context_free,
    assert_law,
    by_model,
    by_script,
    joint,
    kind_of,
    model_params,
    output_of,
    repeated,
    rows_of,
    run,
    table,
)
from reference import Sampling, g_test
from reference_transformer import rms_norm

from specjax import (
    Block,
    DecodeConfig,
    EarlyExitDrafter,
    ExactMatch,
    ModelDrafter,
    NGramDrafter,
    Params,
    Rejection,
    SamplingParams,
    Transformer,
    decode,
    make_pace,
    verify,
)
from specjax.sampling import Role, categorical, window_keys
from specjax.testing.rows import EachRow, Limited
from specjax.types import Draft

NGRAM = Limited(NGramDrafter(num_tokens=K, prompt_lookup_max=3))
BY_NGRAM = DecodeConfig(target=TABLE, drafter=NGRAM, verifier=EachRow(RULES))


# ---- 1-3: what is drawn after a rejection ----

PAIRS = [
    ([0.1, 0.6, 0.3], [0.6, 0.2, 0.2]),
    ([0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1]),
    ([0.7, 0.3], [0.5, 0.5]),
    ([0.05, 0.15, 0.4, 0.4], [0.9, 0.05, 0.0, 0.05]),
    ([0.0, 0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
]


def one_step(target: Any, draft: Any, rows: int) -> tuple[Any, Any, Any]:
    """`Rejection` at K = 1: verdicts, drafted tokens, and what the target draws with the residual's noise."""

    def step(log_p: jax.Array, log_q: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        keys, start = jax.random.split(jax.random.key(4), rows), jnp.zeros(rows, jnp.int32)
        tokens = categorical(Rejection().draft_keys(keys, start, 1), log_q)
        verdict = Rejection()(keys, start, Draft(tokens=tokens, length=start + 1, log_probs=log_q), log_p)
        return verdict, tokens[:, 0], categorical(window_keys(keys, start, 2, Role.RESIDUAL)[:, 0], log_p[:, 0])

    laws = [np.tile(np.log(law).astype(np.float32), (rows, size, 1)) for law, size in ((target, 2), (draft, 1))]
    return jax.tree.map(np.asarray, fast_jit(step)(*laws))


def test_case_01_coin_and_residual_are_independent():
    """One step; one number for coin and residual would give [.10, .58, .32]."""
    target, draft = PAIRS[0]
    verdict, _, _ = one_step(target, draft, rows=20_000)
    assert g_test(np.bincount(verdict.tokens[:, 0], minlength=3), target) > 1e-4
    assert g_test(np.bincount(verdict.num_accepted, minlength=2), [0.5, 0.5]) > 1e-4


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_case_01_02_03_every_position_follows_the_target(target, draft):
    """Same coin and residual: [.10, .58, .32]; softmax of the positive part: [.239, .407, .354]; reused draft noise on
    the second pair: [.100, .377, .298, .225]."""
    tokens = output_of(by_model(target, draft))
    assert_context_free(tokens, target)
    assert_law(tokens, joint(target))


def test_case_02_no_key_is_used_twice():
    """Keys of draft, coin, residual and bonus differ at one position, and from those of every other position."""
    keys = jax.random.split(jax.random.key(0), 2)

    @fast_jit
    def used(start: jax.Array) -> list[jax.Array]:
        windows = [window_keys(keys, start, 5, role) for role in (Role.ACCEPT, Role.RESIDUAL, Role.BONUS)]
        drafts = [rule.draft_keys(keys, start, 4) for rule in (Rejection(), Block())]
        return [jax.random.key_data(key) for key in (*windows, *drafts)]

    bits = []
    for start in range(12):
        *different, by_block = used(np.full(2, start))
        np.testing.assert_array_equal(by_block, different[-1])
        bits += [np.asarray(key) for key in different]
    together = np.concatenate([key.reshape(-1, 2) for key in bits])
    assert len(np.unique(together, axis=0)) == len(together) == 2 * 12 * (4 + 3 * 5)


WIDE = reference.softmax(4 * np.random.default_rng(3).normal(size=50_000))


def test_case_03_equal_laws_are_accepted():
    """Draft and target agree to the last bit on 50,000 tokens."""
    verdict, drafted_tokens, _ = one_step(WIDE, WIDE, rows=16)
    assert (verdict.num_accepted == 1).all()
    np.testing.assert_array_equal(verdict.tokens[:, 0], drafted_tokens)


def test_case_03_an_empty_residual_is_the_target(monkeypatch):
    """Every coin rejects all the same; nothing is divided by zero: the token is the target's own draw."""
    monkeypatch.setattr(verify, "_uniform", lambda keys: jnp.ones(keys.shape))
    verdict, _, own_draw = one_step(WIDE, WIDE, rows=16)
    assert (verdict.num_accepted == 0).all()
    np.testing.assert_array_equal(verdict.tokens[:, 0], own_draw)
    assert len(set(own_draw.tolist())) > 10


# ---- 4-6: the law that the drafter reports is the law it drew from ----


def test_case_04_filtered_draft():
    """Draft top-k 2 of [.4, .3, .2, .1]; the raw law in its place would give [.429, .571, 0, 0]."""
    tokens = output_of(by_model([0.3, 0.5, 0.2, 0.0], [4 / 7, 3 / 7, 0.0, 0.0]))
    assert_context_free(tokens, [0.3, 0.5, 0.2, 0])
    assert_law(tokens, joint([0.3, 0.5, 0.2, 0.0]))


SHARED: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_p": 0.6},
    {"min_p": 0.5},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3, "top_p": 0.9},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
]
TARGET_4, DRAFT_4 = [0.3, 0.5, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]


@cache
def under_shared_transforms() -> Any:
    return by_model(TARGET_4, DRAFT_4, *SHARED)


@pytest.mark.parametrize("kind", range(len(SHARED)))
def test_case_04_transforms_act_on_draft_and_target_alike(kind):
    assert_law(output_of(under_shared_transforms()), joint(TARGET_4, **SHARED[kind]), kind_of(len(SHARED)) == kind)


def test_case_04_model_drafts_have_the_law_they_report():
    draft = drafted(BY_MODEL, model_params(TARGET_4, DRAFT_4), rows_of(*SHARED))
    assert_reported_law(draft)
    for kind, options in enumerate(SHARED):
        rows = kind_of(len(SHARED)) == kind
        law = np.pad(reference.law(np.log(DRAFT_4), Sampling(**options), [0, 1], 2), (0, V - 4))
        assert g_test(np.bincount(draft.tokens[rows, 0], minlength=V), law) > 1e-4
        np.testing.assert_allclose(np.exp(draft.log_probs[rows, 0]), np.broadcast_to(law, (rows.sum(), V)), atol=1e-6)


def drafted(config: DecodeConfig, params: Params, sampling: SamplingParams) -> Draft:
    """The first draft of every row, in NumPy."""
    rows = len(sampling.temperature)
    state = begin(params, KEY, *repeated([0, 1], rows), sampling, config=config, max_new_tokens=NEW)
    return jax.tree.map(np.asarray, propose(params, state, sampling, config=config))


def assert_reported_law(draft: Draft) -> None:
    """No token has q = 0, and each q sums to 1."""
    probs = np.exp(draft.log_probs, dtype=np.float64)
    np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-6)
    assert (np.take_along_axis(probs, draft.tokens[..., None], axis=-1) > 0).all()


TINY = tiny_config(vocab_size=V, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
WEIGHTS = jax.tree.map(lambda leaf: 1.3 * leaf, tiny_params(5, TINY))
DEEP = Transformer(TINY)
EXIT = EarlyExitDrafter(target=DEEP, exit_layer=1, num_tokens=2)
BY_EXIT = DecodeConfig(target=DEEP, drafter=EXIT, verifier=EachRow(RULES[:2]))
EXIT_ROWS = 20_000
EXIT_OPTIONS: dict[str, Any] = {"temperature": 0.9, "top_k": 5, "top_p": 0.95}


def test_case_04_early_exit_drafts_have_the_law_they_report():
    draft = drafted(BY_EXIT, Params(target=WEIGHTS), alike(EXIT_ROWS, **EXIT_OPTIONS))
    assert_reported_law(draft)
    hidden = rms_norm(reference.hidden_states(WEIGHTS, TINY, [0, 1])[1], WEIGHTS["norm"], TINY.norm_epsilon)
    law = reference.law(hidden[-1] @ np.asarray(WEIGHTS["unembed"], np.float64).T, Sampling(**EXIT_OPTIONS), [0, 1], 2)
    assert g_test(np.bincount(draft.tokens[:, 0], minlength=V), law) > 1e-4


def test_case_04_early_exit_keeps_the_targets_law():
    final = run(BY_EXIT, Params(target=WEIGHTS), alike(EXIT_ROWS, max_tokens=3, **EXIT_OPTIONS))
    assert 0.1 < final.stats.accepted.sum() / final.stats.drafted.sum() < 0.9  # or nothing would be shown
    law = np.array([mass * exit_law([0, 1, first]) for first, mass in enumerate(exit_law([0, 1]))])
    rules = {f"rule {index}": np.arange(EXIT_ROWS) % 2 == index for index in range(2)}
    assert_law(output_of(final), law, groups=rules)


def exit_law(text: list[int]) -> np.ndarray:
    return reference.law(reference.forward(WEIGHTS, TINY, text)[-1], Sampling(**EXIT_OPTIONS), text, 2)


def test_case_05_a_greedy_draft_is_a_point_mass():
    """Rows propose 0, 1 or 2; with the softmax [.6, .2, .2] as q, the first would give [.167, .667, .167]."""
    target = [0.1, 0.6, 0.3]
    final = by_script(target, [[0], [1], [2]])
    stats = final.stats
    for token in range(3):
        rows = kind_of(3) == token
        assert_context_free(output_of(final), target, rows)
        assert_law(output_of(final), joint(target), rows)
        proposed, kept = (n[rows, 0].sum() for n in (stats.drafted_per_position, stats.accepted_per_position))
        assert g_test([kept, proposed - kept], [target[token], 1 - target[token]]) > 1e-4


def test_case_06_a_self_drafter_is_always_accepted():
    """bfloat16 logits of 64 tokens at temperature 0.7: one rounding on both sides, whatever the rule."""
    rows, size, rng = 21_000, 64, np.random.default_rng(6)
    logits = jnp.asarray(np.where(rng.random((size, size)) < 0.15, 3, -4) + rng.normal(size=(size, size)), jnp.bfloat16)
    model = TableModel(vocab_size=size)
    drafter = ModelDrafter(model=model, num_tokens=4, vocab_size=size)
    config = DecodeConfig(target=model, drafter=drafter, verifier=EachRow(RULES))
    final = run(config, Params(target=logits, draft=logits), alike(rows, temperature=0.7), text=[1])
    np.testing.assert_array_equal(final.stats.accepted, final.stats.drafted)
    assert final.stats.steps.tolist() == [1] * rows
    laws = reference.softmax(np.asarray(logits, np.float64) / 0.7)
    tokens = final.context.tokens[:, 1:]
    rules = {f"rule {i}": np.arange(rows) % 3 == i for i in range(3)}
    assert_law(tokens, laws[1][:, None] * laws, groups=rules)
    assert_law(tokens[:, 2:], (laws[1] @ laws @ laws)[:, None] * laws, groups=rules)


# ---- 8: one law, whichever branch the token comes from ----

FILTERS: list[tuple[dict[str, Any], list[float], int]] = [
    ({"min_p": 0.4}, [0.625, 0.375, 0, 0], 3),
    ({"top_p": 0.75}, [0.625, 0.375, 0, 0], 3),
    ({"top_k": 2}, [0.625, 0.375, 0, 0], 2),
    ({"logit_bias": (-100.0, *[0.0] * 7)}, [0, 0.6, 0.3, 0.1], 0),
]
FILTERED = [0.5, 0.3, 0.15, 0.05]


@cache
def filtered(branch: str) -> Any:
    """Contrary drafts end in the residual; the target's own are accepted; sure ones lead to the bonus as well."""
    kinds = [options for options, _, _ in FILTERS]
    if branch == "accepted":
        return by_model(FILTERED, FILTERED, *kinds)
    return by_script(FILTERED, [[bad if branch == "residual" else np.argmax(p)] for _, p, bad in FILTERS], *kinds)


@pytest.mark.parametrize("branch", ["accepted", "residual", "bonus"])
@pytest.mark.parametrize("kind", range(len(FILTERS)))
def test_case_08_every_branch_has_the_same_filtered_law(kind, branch):
    final, rows = filtered(branch), kind_of(len(FILTERS)) == kind
    options, right, _ = FILTERS[kind]
    accepted, drafted = final.stats.accepted[rows].sum(), final.stats.drafted[rows].sum()
    assert {"accepted": accepted == drafted, "residual": accepted == 0, "bonus": accepted > drafted / 4}[branch]
    assert_context_free(output_of(final), right, rows)
    assert_law(output_of(final), joint(FILTERED, **options), rows)


# ---- 9: rows of all temperatures in one batch ----

MARKOV = np.random.default_rng(9).dirichlet(np.ones(V), V)
MIXED = [{"temperature": t, "top_p": p} for t, p in zip([0, 1.0, 0, 1e-6], [1, 0.9, 0.5, 1], strict=True)]
MIXED_PARAMS = model_params(MARKOV, np.roll(MARKOV, 1, axis=0))


@cache
def mixed(lonely: bool) -> Any:
    """`lonely`: the sampling rows are left out."""
    config = dataclasses.replace(BY_MODEL, log_probs=True)
    with jax.debug_nans(True):
        return run(config, MIXED_PARAMS, rows_of(*MIXED), silent=lonely & (kind_of(4) == 1))


def test_case_09_greedy_and_sampling_rows_share_a_batch():
    """No row at temperature 0 reaches a division, no row's law is another's, nothing is NaN."""
    tokens, text = output_of(mixed(False)), [1]
    for _ in range(NEW):
        text.append(int(MARKOV[text[-1]].argmax()))
    assert (tokens[kind_of(4) != 1] == text[1:]).all()
    assert_law(tokens, joint(MARKOV, top_p=0.9), kind_of(4) == 1)
    logs = mixed(False).log_probs
    for log_probs in (logs.raw[:, 2:], logs.processed[:, 2:]):
        assert np.isfinite(log_probs[:, :NEW]).all()
    assert (logs.processed[kind_of(4) != 1, 2 : 2 + NEW] > -1e-6).all()
    assert not np.isnan(drafted(BY_MODEL, MIXED_PARAMS, rows_of(*MIXED)).log_probs).any()


def test_case_09_greedy_rows_do_not_notice_a_missing_neighbour():
    rows = kind_of(4) != 1
    np.testing.assert_array_equal(output_of(mixed(True))[rows], output_of(mixed(False))[rows])
    assert (mixed(True).stats.steps[~rows] == 0).all()


# ---- 13: ties at the edge of a filter ----

COLLAPSED = np.asarray(jnp.asarray([5.001, 5.002, 5.003, 5.004, 4, 3, 2, 1], jnp.bfloat16), np.float32)
TIES: list[tuple[dict[str, Any], list[int]]] = [
    ({"top_k": 3}, [0, 1, 2]),
    ({"top_p": 0.5}, [0, 1, 2, 3]),
    ({"logit_bias": (0.0, 2, 1, 1, 1, 0, 0, 0), "top_k": 3}, [1, 2, 3]),
    ({"logit_bias": (0.0, 2, 1, 1, 0, 0, 0, 0), "top_p": 0.6}, [1, 2, 3]),
    ({"logit_bias": tuple(COLLAPSED.tolist()), "top_k": 2}, [0, 1]),
]
FLAT = np.full(V, 1 / V)


@cache
def tied(by: str) -> Any:
    kinds = [options for options, _ in TIES]
    return by_model(FLAT, FLAT, *kinds) if by == "model" else by_script(FLAT, [[7, 0, 1, 2]] * len(TIES), *kinds)


@pytest.mark.parametrize("kind", range(len(TIES)))
def test_case_13_ties_are_cut_alike_everywhere(kind):
    """Plain rows (K = 0), accepted, recovered and bonus tokens keep one set, lowest ids first."""
    (options, kept), rows = TIES[kind], kind_of(len(TIES)) == kind
    right = reference.law(np.log(FLAT), Sampling(**options), [0, 1], 2)
    assert np.flatnonzero(right).tolist() == kept
    for by in ("model", "script"):
        assert_context_free(output_of(tied(by)), right, rows)
    np.testing.assert_array_equal(tied("model").stats.accepted, tied("model").stats.drafted)


def test_case_13_the_drafter_keeps_the_same_set():
    draft = drafted(BY_MODEL, model_params(FLAT, FLAT), rows_of(*[options for options, _ in TIES]))
    assert_reported_law(draft)
    for kind, (_, kept) in enumerate(TIES):
        for law in draft.log_probs[12 * kind]:
            assert np.flatnonzero(np.isfinite(law)).tolist() == kept


# ---- The joint law under every drafter ----

STATES = [[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.25, 0.5]]
DRAFT_STATES = [[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [0.4, 0.2, 0.4]]


def test_joint_law_of_a_markov_chain_under_a_model_drafter():
    assert_law(output_of(by_model(STATES, DRAFT_STATES)), joint(STATES))


def test_joint_law_of_a_markov_chain_under_a_script():
    final = by_script(STATES, [[1, 0, 0, 1], [2, 2, 1, 0]])
    for kind in range(2):
        assert_law(output_of(final), joint(STATES), kind_of(2) == kind)


def test_joint_law_of_a_markov_chain_under_an_ngram_drafter():
    params = Params(target=table(STATES), draft={"draft": None, "limit": jnp.asarray(LIMIT)})
    final = run(BY_NGRAM, params, rows_of(), text=[0, 1, 2, 2, 0, 1, 0, 2, 1])
    assert 0.1 < final.stats.accepted.sum() / final.stats.drafted.sum() < 0.9
    assert_law(final.context.tokens[:, 9:14], joint(STATES))


def test_stop_ids_keep_the_law_under_speculation():
    """EOS ends a row wherever in the window it falls, and never before `min_tokens`."""
    final = by_model(STATES, DRAFT_STATES, stop_token_ids=[2], min_tokens=1)
    laws, length = np.array(STATES), final.context.length - 2
    assert (output_of(final)[:, 0] != 2).all()
    alive, ends = laws[1, :2] / laws[1, :2].sum(), np.zeros(NEW + 1)
    for count in range(2, NEW):
        ends[count], alive = alive @ laws[:2, 2], alive @ laws[:2, :2]
    ends[NEW] = 1 - ends.sum()
    for name, rows in GROUPS.items():
        assert g_test(np.bincount(length[rows], minlength=NEW + 1), ends) > 1e-4, name


def test_a_length_rule_does_not_peek_at_the_sampled_token():
    """Whether a draft pays is decided before its tokens are drawn, or p = [.7, .3] is lost.

    The draft model breaks (NaN) after token 0, which cuts its draft to one token; only longer ones pay here. Rows are
    batches of their own: in one batch what a row drew would hardly move the choice of all.
    """
    drafter = ModelDrafter(model=TABLE, num_tokens=K, vocab_size=V)
    config = DecodeConfig(target=TABLE, drafter=drafter, verifier=Rejection())
    params = Params(target=table([0.7, 0.3]), draft=table([0.5, 0.5]).at[0].set(jnp.nan))
    rest = *repeated((0, 1), 1), alike(1), make_pace(1, [1.0, 1.9])

    @jax.vmap
    def alone(key: jax.Array) -> jax.Array:
        return decode.generate(params, key, *rest, config=config, max_new_tokens=NEW).tokens[0]

    tokens = fast_jit(alone)(jax.random.split(KEY, 4_000))
    for place in range(NEW):
        assert g_test(np.bincount(tokens[:, place], minlength=2), [0.7, 0.3]) > 1e-4, place


def test_rows_that_decide_together_keep_the_law():
    """What one row's coins teach decides whether the others draft: three rules side by side, in batches of three."""
    drafter, rules = ModelDrafter(model=TABLE, num_tokens=K, vocab_size=V), (Rejection(), Block(), ExactMatch())
    config = DecodeConfig(target=TABLE, drafter=drafter, verifier=EachRow(rules))
    params = Params(target=table(STATES), draft=table(DRAFT_STATES))
    rest = *repeated((0, 1), 3), alike(3), make_pace(3, [1.0, 1.9])

    @jax.vmap
    def together(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = decode.generate(params, key, *rest, config=config, max_new_tokens=NEW)
        return output.tokens, output.stats.drafted

    tokens, drafted = fast_jit(together)(jax.random.split(KEY, 6_000))
    assert len(np.unique(drafted[:, 0])) > 1
    assert_law(
        np.asarray(tokens).reshape(-1, NEW),
        joint(STATES),
        groups={f"rule {i}": np.arange(18_000) % 3 == i for i in range(3)},
    )


def test_a_coin_is_never_zero_or_one(monkeypatch):
    """Where all 32 bits are zeros a token of chance 1e-30 is rejected and one of 1e-9 is not; one of 1 never is."""
    edges = jnp.array([0, 1, 2**8, 2**31, 2**32 - 1], jnp.uint32)
    coins = verify.between(edges)
    np.testing.assert_allclose(coins, [2.0**-33, 1.5 * 2.0**-32, 2.0**-24, 0.5, 1 - 2.0**-24], rtol=1e-2)
    assert ((coins > 1e-30) & (coins < 1)).all()
    draft = Draft(tokens=jnp.array([[1]]), length=jnp.array([1]))
    for bits, chance, right in ((0, 1e-30, 0), (0, 1e-9, 1), (2**32 - 1, 1.0, 1)):
        law = jnp.log(jnp.array([1 - chance, chance], jnp.float32))
        monkeypatch.setattr(jax.random, "bits", lambda key, dtype, bits=bits: jnp.array(bits, dtype))
        verdict = Rejection()(jax.random.split(KEY, 1), jnp.array([3]), draft, jnp.tile(law, (1, 2, 1)))
        assert verdict.num_accepted.tolist() == [right]
