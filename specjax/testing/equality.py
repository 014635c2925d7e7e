"""Checks under equal keys: texts that must be the same token for token, whatever drafts, neighbours, calls and pauses.

A `Subject` is a batch of rows of every rule (`EachRow`) and every K from 0 to `WINDOW` (`Limited`), with prompts,
limits, stop ids and transforms of all kinds.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.models.config import TransformerConfig
from specjax.models.params import init_params
from specjax.models.transformer import Transformer
from specjax.testing import report
from specjax.testing.compiling import compiled
from specjax.testing.models import HistoryModel, ScriptedDrafter, history_params, script_of
from specjax.testing.monte_carlo import RULES, row_sampling
from specjax.testing.report import Finding
from specjax.testing.rows import EachRow, Limited, limited_params, take_rows
from specjax.types import DecodeState, Drafter, FinishReason, LanguageModel, Output, Params, SamplingParams, Verifier
from specjax.verify import ExactMatch, Greedy

WINDOW, WIDTH, NEW = 8, 40, 24
ROWS = 4 * (WINDOW + 1) * 4
"""A multiple of the number of rules: one, two, three or four."""
ALL = 2**31 - 1

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1, "repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.5},
)
SCRIPTS = ("oracle", "contrary", "mixed", "random")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The data of a decoding call."""

    params: Params
    keys: jax.Array
    """`[B]` row keys."""
    prompt: jax.Array
    """`[B, P]`."""
    length: jax.Array
    """`[B]`."""
    sampling: SamplingParams

    def rows(self, index: Any) -> "Batch":
        """Some of the rows, in another order."""
        keys, prompt, length, sampling = jax.tree.map(
            lambda x: x[index], (self.keys, self.prompt, self.length, self.sampling)
        )
        params = take_rows(self.params, index)
        return Batch(params=params, keys=keys, prompt=prompt, length=length, sampling=sampling)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A decoder and rows for it."""

    name: str
    config: DecodeConfig
    batch: Batch
    plain: Output
    """What `autoregressive` makes of the rows."""
    rules: Mapping[str, Verifier]
    """Row r is judged by rule r modulo their number."""
    decoder: "Decoder"
    """Of the config."""

    @property
    def row_rules(self) -> np.ndarray:
        """`[B]`, the name of each row's rule."""
        return np.resize(list(self.rules), len(self.batch.length))

    @property
    def equal_rows(self) -> np.ndarray:
        """`[B]` bool: rows whose text must be that of plain decoding."""
        greedy = np.asarray(self.batch.sampling.temperature) == 0
        shared = [name for name, rule in self.rules.items() if isinstance(rule, ExactMatch)]
        return greedy | np.isin(self.row_rules, shared)

    @functools.cached_property
    def whole(self) -> Output:
        """What the decoder makes of the rows, undisturbed."""
        return self.decoder.run(self.batch)

    @property
    def limits(self) -> np.ndarray:
        """`[B]`, the K of each row."""
        return np.asarray(self.batch.params.draft["limit"])


class Decoder:
    """The compiled programs of a config."""

    def __init__(self, config: DecodeConfig, max_new_tokens: int = NEW):
        level = int(isinstance(config.target, Transformer))  # whose steps take longer than compiling well
        self.max_new_tokens = max_new_tokens
        self.prefill = compiled(
            lambda *data: decode.prefill(*data, config=config, max_new_tokens=max_new_tokens), level=level
        )
        self.steps = compiled(lambda *data: decode.decode_steps(*data, config=config), level=level)

    def begin(self, batch: Batch) -> DecodeState:
        """The state before the first step."""
        return self.prefill(batch.params, batch.keys, batch.prompt, batch.length, batch.sampling)

    def go_on(self, batch: Batch, state: DecodeState, num_steps: int = ALL) -> DecodeState:
        """The state some steps later."""
        return self.steps(batch.params, state, batch.sampling, jnp.int32(num_steps))

    def run(self, batch: Batch) -> Output:
        """The rows' output, in NumPy."""
        return self.output(self.go_on(batch, self.begin(batch)))

    def output(self, state: DecodeState) -> Output:
        """What a state has put out, in NumPy."""
        return jax.tree.map(np.asarray, decode.output(state, max_new_tokens=self.max_new_tokens))


def differing(first: Output, second: Output) -> np.ndarray:
    """`[B]` bool: rows whose tokens, length or finish reason differ."""
    apart = (first.tokens != second.tokens).any(axis=1)
    return np.asarray(apart | (first.length != second.length) | (first.finish_reason != second.finish_reason))


# ---- Subjects ----


def history_target() -> tuple[LanguageModel, Any]:
    """A target whose law depends on all of its cache, in exact arithmetic."""
    return HistoryModel(vocab_size=11), history_params(7)


def transformer_target() -> tuple[LanguageModel, Any]:
    """A small transformer with clear preferences."""
    config = TransformerConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=WIDTH + NEW + WINDOW,
    )
    return Transformer(config), init_params(jax.random.key(3), config, scale=0.4)


def subject(
    name: str,
    target: tuple[LanguageModel, Any],
    drafter: Drafter | None,
    draft_params: Any = None,
    *,
    rules: Mapping[str, Verifier] = RULES,
) -> Subject:
    """Rows of all kinds for a drafter; None scripts the drafts, from the target's own plain text (`SCRIPTS`)."""
    model, weights = target
    plain = rows_for(Params(target=weights), rules)
    oracle = Decoder(decode.without_speculation(DecodeConfig(target=model))).run(plain)
    if drafter is None:
        drafter, draft_params = ScriptedDrafter(num_tokens=WINDOW), script_of(_scripted(plain, oracle), WINDOW)
    limits = np.arange(ROWS) // len(rules) % (WINDOW + 1)
    params = limited_params(Params(target=weights, draft=draft_params), limits)
    verifier = EachRow(tuple(rules.values()))
    config = DecodeConfig(target=model, drafter=Limited(drafter), verifier=verifier, prefill_chunk=7)
    batch = dataclasses.replace(plain, params=params)
    return Subject(name=name, config=config, batch=batch, plain=oracle, rules=rules, decoder=Decoder(config))


def rows_for(params: Params, rules: Mapping[str, Verifier]) -> Batch:
    """Ragged prompts that repeat themselves, and limits, stop ids and transforms of all kinds."""
    random, judges = np.random.default_rng(4), list(rules.values())
    hands = np.arange(ROWS) // len(rules)  # what goes by them is dealt to every rule; periods are prime to that of K
    kinds = [
        KINDS[hand % len(KINDS)] | ({"temperature": 0.0} if isinstance(judges[row % len(rules)], Greedy) else {})
        for row, hand in enumerate(hands)
    ]
    length = 1 + hands * 5 % (WIDTH - NEW)
    prompt = np.tile(random.integers(0, 11, (ROWS, 4)), (1, WIDTH // 4))
    sampling = row_sampling(
        kinds,
        max_tokens=random.integers(NEW // 2, NEW + 1, ROWS).tolist(),
        min_tokens=np.where(hands % 4 == 0, random.integers(1, 7, ROWS), 0).tolist(),
        stop_token_ids=[[int(x)] if x < 11 else [] for x in random.integers(0, 30, ROWS)],
    )
    return Batch(
        params=params,
        keys=jax.random.split(jax.random.key(12), ROWS),
        prompt=jnp.asarray(prompt, jnp.int32),
        length=jnp.asarray(length, jnp.int32),
        sampling=sampling,
    )


def script_kinds() -> np.ndarray:
    """`[ROWS]`, the index of each row's script in `SCRIPTS`."""
    return np.arange(ROWS) // (ROWS // len(SCRIPTS))


def _scripted(plain: Batch, oracle: Output) -> jax.Array:
    """`[ROWS, N]`, the text that each row's drafts follow: the right one, another token everywhere, or a mixture."""
    random, columns = np.random.default_rng(6), np.arange(WIDTH + NEW)
    length = np.asarray(plain.length)[:, None]
    right = np.where(
        columns < length,
        np.pad(plain.prompt, ((0, 0), (0, NEW))),
        np.take_along_axis(np.asarray(oracle.tokens), np.clip(columns - length, 0, NEW - 1), axis=1),
    )
    noise = random.integers(0, 11, right.shape)
    mixed = np.where(random.random(right.shape) < 0.7, right, noise)
    return jnp.asarray(np.choose(script_kinds()[:, None], [right, (right + 1) % 11, mixed, noise]), jnp.int32)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "script": lambda: subject("script", history_target(), None),
    "model": lambda: subject(
        "model",
        history_target(),
        ModelDrafter(model=HistoryModel(vocab_size=11), num_tokens=WINDOW, vocab_size=11),
        history_params(8),
    ),
    "ngram": lambda: subject("ngram", history_target(), NGramDrafter(num_tokens=WINDOW)),
    "early exit": lambda: _early_exit(transformer_target()),
    "transformer, script": lambda: subject("transformer, script", transformer_target(), None),
}
"""Rows for each kind of drafter; no drafter at all is K = 0."""


def _early_exit(target: tuple[Any, Any]) -> Subject:
    return subject("early exit", target, EarlyExitDrafter(target=target[0], exit_layer=1, num_tokens=WINDOW))


# ---- Checks ----


def check_tokens(chosen: Subject) -> Iterator[Finding]:
    """The text of `ExactMatch`, and of any rule at temperature 0, is that of `autoregressive` under the same keys."""
    wrong = differing(chosen.whole, chosen.plain)
    for rule in chosen.rules:
        rows = chosen.equal_rows & (chosen.row_rules == rule)
        if rows.any():
            yield report.differences("tokens", f"{chosen.name}, {rule}", int((wrong & rows).sum()), int(rows.sum()))


def check_steps(chosen: Subject) -> Iterator[Finding]:
    """Right drafts emit K + 1 tokens a step (tau = K + 1), wrong ones a single token (tau = 1)."""
    found = chosen.whole
    emitted, steps, limits = found.length, found.stats.steps, chosen.limits
    right = {"oracle": -(-emitted // (limits + 1)), "contrary": emitted}
    for name, expected in right.items():
        rows = chosen.equal_rows & (script_kinds() == SCRIPTS.index(name))
        yield report.differences("tau", f"{name} drafts", int((steps != expected)[rows].sum()), int(rows.sum()))


def check_greedy_text(chosen: Subject) -> Iterator[Finding]:
    """Greedy texts of a `HistoryModel` are those that NumPy writes without a cache."""
    found, batch = chosen.whole, chosen.batch
    model: Any = chosen.config.target
    sampling = jax.tree.map(np.asarray, batch.sampling)
    simple = (sampling.temperature == 0) & (sampling.frequency_penalty == 0) & (sampling.repetition_penalty == 1)
    simple &= (sampling.presence_penalty == 0) & (sampling.min_tokens == 0)
    wrong = 0
    for row in np.flatnonzero(simple):
        text = np.asarray(batch.prompt)[row, : batch.length[row]].tolist()
        for token in found.tokens[row, : found.length[row]].tolist():
            wrong += token != int(model.logits_after(batch.params.target, text).argmax())
            text.append(token)
    yield report.differences("greedy", f"{chosen.name}, NumPy", wrong, int(found.length[simple].sum()))


def check_rows(chosen: Subject) -> Iterator[Finding]:
    """Under any rule a text does not depend on the order of rows, on padding rows or on pauses."""
    decoder, batch = chosen.decoder, chosen.batch
    count, size = len(batch.length), len(chosen.rules)
    backwards = np.arange(count).reshape(-1, size)[::-1].ravel()
    yield _compared(chosen, "order", decoder.run(batch.rows(backwards)), backwards)
    kept = np.arange(count) // size % 2 == 0
    lonely = dataclasses.replace(batch, length=jnp.where(kept, batch.length, 0))
    found = decoder.run(lonely)
    yield _compared(chosen, "padding rows", jax.tree.map(lambda x: x[kept], found), kept)
    yield _compared(chosen, "pauses", decoder.output(_with_pauses(decoder, batch)))


def check_shapes(chosen: Subject) -> Iterator[Finding]:
    """Under any rule a text does not depend on the number of rows or on prompt chunks: on programs of other shapes."""
    decoder, batch = chosen.decoder, chosen.batch
    size = len(chosen.rules)
    first = len(batch.length) // 2 // size * size
    few = np.arange(first, first + size)
    yield _compared(chosen, "batch size", decoder.run(batch.rows(few)), few)
    other = Decoder(dataclasses.replace(chosen.config, prefill_chunk=1), decoder.max_new_tokens)
    yield _compared(chosen, "prompt chunks of 1", decoder.output(decoder.go_on(batch, other.begin(batch))))


def _compared(chosen: Subject, case: str, found: Output, rows: Any = slice(None)) -> Finding:
    wrong = differing(found, jax.tree.map(lambda x: x[rows], chosen.whole))
    return report.differences("rows", f"{chosen.name}, {case}", int(wrong.sum()), len(wrong))


def _with_pauses(decoder: Decoder, batch: Batch) -> DecodeState:
    """Steps one at a time, the state taken to the host and back in between."""
    state = decoder.begin(batch)
    while (np.asarray(state.finish_reason) == FinishReason.RUNNING).any():
        state = decoder.go_on(batch, state, 1)
        keys = jax.random.key_data(state.keys)
        host = jax.tree.map(np.asarray, dataclasses.replace(state, keys=keys))
        state = jax.tree.map(jnp.asarray, dataclasses.replace(host, keys=jax.random.wrap_key_data(keys)))
    return state


def check_resume(chosen: Subject) -> Iterator[Finding]:
    """Any part of a text, read as a prompt, is continued by the rest of it, where noise goes by position."""
    decoder, batch = chosen.decoder, chosen.batch
    whole = chosen.whole
    cut = np.arange(len(whole.length)) * 7 % np.maximum(whole.length, 1)
    found = decoder.run(_read_on(batch, whole, cut))
    offsets = np.arange(decoder.max_new_tokens)
    columns = np.minimum(offsets + cut[:, None], decoder.max_new_tokens - 1)
    inside = offsets < (whole.length - cut)[:, None]
    rest = np.where(inside, np.take_along_axis(np.asarray(whole.tokens), columns, axis=1), 0)
    expected = dataclasses.replace(whole, tokens=rest, length=whole.length - cut)
    rows = chosen.equal_rows & _blind_to_prompts(batch.sampling)
    wrong = differing(found, expected) & rows
    yield report.differences("rows", f"{chosen.name}, resumed from text", int(wrong.sum()), int(rows.sum()))


def _read_on(batch: Batch, whole: Output, cut: np.ndarray) -> Batch:
    """The batch whose prompts end with the first `cut` `[B]` tokens of their output."""
    length, prompt = np.asarray(batch.length), np.array(batch.prompt)
    for row, count in enumerate(cut):
        prompt[row, length[row] : length[row] + count] = whole.tokens[row, :count]
    sampling = dataclasses.replace(batch.sampling, max_tokens=batch.sampling.max_tokens - jnp.asarray(cut, jnp.int32))
    return dataclasses.replace(
        batch, prompt=jnp.asarray(prompt), length=jnp.asarray(length + cut, jnp.int32), sampling=sampling
    )


def _blind_to_prompts(sampling: SamplingParams) -> np.ndarray:
    """`[B]` bool: rows whose law is the same, whichever part of a text is called its prompt."""
    rows = jax.tree.map(np.asarray, sampling)
    return (rows.presence_penalty == 0) & (rows.frequency_penalty == 0) & (rows.min_tokens == 0)


def check_equality(names: Sequence[str] = tuple(SUBJECTS)) -> Iterator[Finding]:
    """All of this for every kind of drafter; those that are scripted are not put to other shapes."""
    for name in names:
        shapes = [] if "script" in name else [check_shapes]
        scripted = [check_steps, check_greedy_text] if name == "script" else []
        yield from checked(name, [check_tokens, check_rows, *shapes, check_resume, *scripted])


def checked(name: str, checks: Sequence[Callable[[Subject], Iterator[Finding]]]) -> Iterator[Finding]:
    """Checks of one of the `SUBJECTS`, made at the same precision."""
    with jax.default_matmul_precision("highest"):
        chosen = SUBJECTS[name]()
    yield from exactly(chosen, checks)


def exactly(chosen: Subject, checks: Sequence[Callable[[Subject], Iterator[Finding]]]) -> Iterator[Finding]:
    """Checks of a subject at the matmul precision at which equal texts are promised."""
    for check in checks:
        with jax.default_matmul_precision("highest"):
            found = list(check(chosen))
        yield from found
