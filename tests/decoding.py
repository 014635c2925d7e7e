"""Runs the decoder for the tests, step by step with every invariant asserted, or in one compiled loop."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import HistoryModel, Script, ScriptedDrafter, TableModel, history_params, tiny_config, tiny_params
from reference import Noise

from specjax import ModelDrafter, Transformer, decode, sampling_params
from specjax.decode import DecodeConfig
from specjax.sampling import Role
from specjax.testing.compiling import compiler_options
from specjax.testing.rows import EachRow, Limited
from specjax.types import DecodeState, Draft, FinishReason, Pace, Params, SamplingParams
from specjax.verify import ExactMatch, Greedy

fast_jit = partial(jax.jit, compiler_options=compiler_options(0))
"""`jax.jit`, compiled in a hurry."""

prefill = fast_jit(decode.prefill, static_argnames=("config", "max_new_tokens"))
decode_steps = fast_jit(decode.decode_steps, static_argnames=("config",), donate_argnames=("state",))
generate = fast_jit(decode.generate, static_argnames=("config", "max_new_tokens"))
autoregressive = fast_jit(decode.autoregressive, static_argnames=("config", "max_new_tokens"))

ALL = 2**31 - 1
RUNNING, STOP, LENGTH, NAN = (int(reason) for reason in FinishReason)


def pad(prompts: list[list[int]], width: int, *, pad_id: int = 0) -> tuple[jax.Array, jax.Array]:
    """Prompts `[B, width]` and their lengths; an empty prompt makes a padding row."""
    rows = [[*prompt, *[pad_id] * (width - len(prompt))] for prompt in prompts]
    return jnp.array(rows, jnp.int32), jnp.array([len(prompt) for prompt in prompts], jnp.int32)


# ---- Step by step ----


def snapshot(state: DecodeState) -> Any:
    """The state in NumPy arrays, keys as their bits."""
    return jax.tree.map(np.asarray, state.replace(keys=jax.random.key_data(state.keys)))


def begin(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> DecodeState:
    """`prefill`, which asks for no verdict: one program serves all verifiers."""
    config = dataclasses.replace(config, verifier=ExactMatch())
    return prefill(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)


def proceed(
    params: Params, state: DecodeState, sampling: SamplingParams, num_steps: int = ALL, *, config: DecodeConfig
) -> DecodeState:
    """Some more steps, by default all there are, without a look at what lies between."""
    return decode_steps(params, state, sampling, jnp.int32(num_steps), config=config)


@partial(fast_jit, static_argnames="config")
def propose(params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig) -> Draft:
    """What the drafter says in this state, with the keys of the verifier."""
    keys = config.verifier.draft_keys(state.keys, state.context.length, config.drafter.num_tokens)
    return config.drafter.draft(params, keys, state.draft_state, state.context, sampling, state.cache)[0]


def play(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> list[Any]:
    """The snapshot after prefill and after each step, invariants asserted; the arguments are those of `generate`."""
    state = begin(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
    states = [snapshot(state)]
    assert_caches(states[0], states[0], config)
    while (states[-1].finish_reason == RUNNING).any():
        state = proceed(params, state, sampling, 1, config=config)
        states.append(snapshot(state))
        assert_invariants(states[-2], states[-1], sampling, config)
    assert len(states) <= max_new_tokens + 1
    return states


def outputs(state: Any) -> list[list[int]]:
    """The output tokens of each row."""
    context = state.context
    return [
        row[start:end].tolist()
        for row, start, end in zip(context.tokens, context.prompt_length, context.length, strict=True)
    ]


def generated(output: Any) -> list[list[int]]:
    """The output tokens of each row of `generate`."""
    return [row[:length].tolist() for row, length in zip(np.asarray(output.tokens), output.length, strict=True)]


# ---- One program for texts that are known in advance ----

ROWS, WIDTH, NEW, WINDOW, VOCAB = 120, 8, 12, 8, 16
SCRIPTED = DecodeConfig(
    target=TableModel(vocab_size=VOCAB), drafter=ScriptedDrafter(num_tokens=WINDOW), verifier=EachRow()
)


def play_scripts(
    logits: Any,
    prompts: Sequence[list[int]],
    propose: Callable[[int, int], Sequence[int]],
    *,
    filler: int = -1,
    **sampling: Any,
) -> list[Any]:
    """`play` for at most 120 prompts over a table `[VOCAB, VOCAB]`; values of `sampling` may be lists, one per prompt.

    When a row's text has n tokens, `propose(row, n)` tokens are drafted; `filler` stands behind them.
    """
    spare = ROWS - len(prompts)
    tokens, length = np.full((ROWS, WIDTH + NEW, WINDOW), filler, np.int32), np.zeros((ROWS, WIDTH + NEW), np.int32)
    for row, count in np.ndindex(len(prompts), WIDTH + NEW):
        draft = list(propose(row, count))
        tokens[row, count, : len(draft)], length[row, count] = draft, len(draft)
    script = Script(tokens=jnp.asarray(tokens), length=jnp.asarray(length))
    options = {name: [*x, *[x[-1]] * spare] if isinstance(x, list) else x for name, x in sampling.items()}
    return play(
        Params(target=jnp.asarray(logits, jnp.float32), draft=script),
        jax.random.key(17),
        *pad([*prompts, *[[]] * spare], WIDTH),
        sampling_params(ROWS, **{"max_tokens": NEW} | options),
        config=SCRIPTED,
        max_new_tokens=NEW,
    )


# ---- One program for a target and a draft model that are both transformers ----

TINY, SHORT = Transformer(tiny_config()), Transformer(tiny_config(max_positions=24))
PAIR = DecodeConfig(
    target=TINY,
    drafter=ModelDrafter(model=SHORT, num_tokens=5, vocab_size=61),
    verifier=Greedy(),
)
PAIR_PARAMS = Params(target=tiny_params(), draft=tiny_params(1))
SELF_PARAMS = Params(target=tiny_params(), draft=tiny_params())
"""With the target's weights the draft model is always right."""
PAIR_ROWS, LONG = 16, 200


def pair_inputs(prompts: list[list[int]], **sampling: Any) -> tuple[jax.Array, jax.Array, jax.Array, SamplingParams]:
    """Key, prompts, their lengths and parameters, for at most 16 prompts of at most 24 tokens and 200 new ones.

    Values of `sampling` may be lists, one per prompt.
    """
    spare = PAIR_ROWS - len(prompts)
    options = {name: [*x, *[x[-1]] * spare] if isinstance(x, list) else x for name, x in sampling.items()}
    rows = sampling_params(PAIR_ROWS, **{"max_tokens": LONG} | options)
    return jax.random.key(0), *pad([*prompts, *[[]] * spare], 24), rows


def play_pair(params: Params, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """`play` for the prompts of `pair_inputs`."""
    return play(params, *pair_inputs(prompts, **sampling), config=PAIR, max_new_tokens=LONG)


# ---- One program for long texts of a target that remembers all ----

HISTORY, SALT = HistoryModel(vocab_size=11), history_params(3)
BY_HISTORY = DecodeConfig(target=HISTORY, drafter=ScriptedDrafter(num_tokens=5), verifier=EachRow())


def play_history(prompts: list[list[int]], script: Script, **sampling: Any) -> list[Any]:
    """`play` for 48 prompts in 31 columns and up to 60 new tokens."""
    data = jax.random.key(8), *pad(prompts, 31), sampling_params(48, **sampling)
    return play(Params(target=SALT, draft=script), *data, config=BY_HISTORY, max_new_tokens=60)


# ---- Invariants ----


def assert_invariants(before: Any, after: Any, sampling: SamplingParams, config: DecodeConfig) -> None:
    """What must hold between the snapshots before and after any step of any batch."""
    live = before.finish_reason == RUNNING
    assert_frozen(before, after, ~live)
    for row in np.flatnonzero(live):
        assert_text(before, after, row, sampling, config)
        assert_counters(before, after, row, config.drafter.num_tokens)
    assert_caches(before, after, config)


def assert_frozen(before: Any, after: Any, done: np.ndarray) -> None:
    """Done rows keep every committed field, the target's cache and every counter, bit for bit; keys never change."""
    for name in ("context", "limit", "finish_reason", "cache", "stats", "log_probs"):
        old, new = jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name))
        for first, second in zip(old, new, strict=True):
            assert first[done].tobytes() == second[done].tobytes(), f"{name} of a done row changed"
    assert before.pace.acceptance[done].tobytes() == after.pace.acceptance[done].tobytes()
    for name in ("keys", "limit"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    np.testing.assert_array_equal(before.context.prompt_length, after.context.prompt_length)


def assert_text(before: Any, after: Any, row: int, sampling: SamplingParams, config: DecodeConfig) -> None:
    """A live row grows by 1..K + 1 tokens, stops at the first stop id or at its limit, and touches nothing else."""
    start, end, limit = (int(x[row]) for x in (before.context.length, after.context.length, after.limit))
    old, new, reason = before.context.tokens[row], after.context.tokens[row], after.finish_reason[row]
    stops = set(np.asarray(sampling.stop_token_ids)[row].tolist()) - {-1}
    emitted = new[start:end].tolist()
    assert len(emitted) <= config.drafter.num_tokens + 1
    assert emitted or reason == NAN
    assert all(0 <= token < config.target.vocab_size for token in emitted)
    assert not stops & set(emitted[:-1])
    np.testing.assert_array_equal(new[:start], old[:start])
    assert (new[end:] == config.pad_id).all()
    assert end <= limit
    stopped = bool(emitted) and emitted[-1] in stops
    assert (reason == STOP) == stopped
    assert (reason == LENGTH) == (end == limit and not stopped)
    if stopped:
        assert end - 1 - before.context.prompt_length[row] >= np.asarray(sampling.min_tokens)[row]


def assert_counters(before: Any, after: Any, row: int, window: int) -> None:
    """One step: its drafted, accepted and emitted tokens agree with one another and with the text."""
    step = jax.tree.map(lambda new, old: new[row] - old[row], after.stats, before.stats)
    drafted, accepted, emitted = int(step.drafted), int(step.accepted), int(step.emitted)
    assert step.steps == 1
    assert emitted == after.context.length[row] - before.context.length[row]
    assert 0 <= accepted <= drafted <= max(min(window, before.limit[row] - before.context.length[row] - 1), 0)
    finished = after.finish_reason[row] != RUNNING
    assert emitted == accepted + 1 or (finished and emitted == accepted)
    np.testing.assert_array_equal(step.drafted_per_position, np.arange(window) < drafted)
    np.testing.assert_array_equal(step.accepted_per_position, np.arange(window) < accepted)
    np.testing.assert_array_equal(step.histogram, np.arange(window + 1) == accepted)


def assert_caches(before: Any, after: Any, config: DecodeConfig) -> None:
    """The last token of each row is pending, caches stand for all before it, and only the window was written."""
    length = np.maximum(after.context.length - 1, 0)
    assert (after.cache.length == length).all()
    for old, new in zip(_buffers(before.cache), _buffers(after.cache), strict=True):
        slots = np.arange(old.shape[2])
        first = before.context.length[:, None] - 1
        outside = (slots < first) | (slots > first + config.drafter.num_tokens)
        changed = (old != new).any(axis=(1, 3)) & ~(np.isnan(old) & np.isnan(new)).any(axis=(1, 3))
        assert not (changed & outside).any(), "a slot outside the window was written"
    _assert_stands_for(after.cache, after.context.tokens, length, config.target)
    drafter = config.drafter.drafter if isinstance(config.drafter, Limited) else config.drafter
    if hasattr(drafter, "model"):
        assert (after.draft_state.length == length).all()
        _assert_stands_for(after.draft_state, after.context.tokens, length, drafter.model)


def _buffers(cache: Any) -> list[np.ndarray]:
    return [*cache.keys, *cache.values]


def _assert_stands_for(cache: Any, tokens: np.ndarray, length: np.ndarray, model: Any) -> None:
    """A `HistoryModel` keeps the text itself in its cache: the committed tokens, each at its position."""
    if isinstance(model, HistoryModel):
        slots = np.arange(cache.keys[0].shape[2])
        kept = slots < length[:, None]
        assert (cache.keys[0][:, 0, :, 0] == tokens[:, : len(slots)])[kept].all()
        assert (cache.values[0][:, 0, :, 0] == slots)[kept].all()


# ---- The library's randomness, spelled out from the key schedule ----

WINDOW_ROLES = {"draft": Role.DRAFT, "accept": Role.ACCEPT, "residual": Role.RESIDUAL, "bonus": Role.BONUS}


def row_noise(key: jax.Array, vocab_size: int, *, shared: bool = False, size: int = 32, window: int = 8) -> Noise:
    """What a row with this key draws up to position `size`; `shared`: drafts use the target's noise (`ExactMatch`)."""
    roles, starts, offsets = np.indices((len(Role), size, window + 1))
    coins, windows, plain = jax.tree.map(np.asarray, _draws(key, roles, starts, offsets, vocab_size))

    def gumbel(role: str, start: int, offset: int) -> np.ndarray:
        if role == "plain" or (shared and role == "draft"):
            return plain[Role.TARGET, start + offset, 0]
        return windows[WINDOW_ROLES[role], start, offset]

    return Noise(uniform=lambda start, offset: float(coins[Role.ACCEPT, start, offset]), gumbel=gumbel)


def _draw(key: jax.Array, role: Any, start: Any, offset: Any, vocab_size: int) -> tuple[jax.Array, ...]:
    """A coin and the Gumbel vectors of a place in a window, and of a position."""
    position = jax.random.fold_in(jax.random.fold_in(key, role), start)
    place = jax.random.fold_in(position, offset)
    gumbels = [jax.random.gumbel(noise, (vocab_size,), mode="high") for noise in (place, position)]
    return (jax.random.bits(place, dtype=jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32, *gumbels


@partial(fast_jit, static_argnums=4)
def _draws(key: jax.Array, roles: Any, starts: Any, offsets: Any, vocab_size: int) -> tuple[jax.Array, ...]:
    draw = partial(_draw, key, vocab_size=vocab_size)
    for _ in range(roles.ndim):
        draw = jax.vmap(draw)
    return draw(roles, starts, offsets)
