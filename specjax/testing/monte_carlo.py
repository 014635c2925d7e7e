"""Monte Carlo on the jitted `generate`: do the first tokens of a great many rows follow the target's joint law?

Rows are independent, so one batch holds every rule, length of draft, transform and prompt, and few programs compile.
Rows are drawn in batches of `CHUNK`, whatever their number, and only counts are kept.
"""

import dataclasses
import math
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
from specjax.report.goodness_of_fit import combined, g_test, suffices
from specjax.sampling import sampling_params
from specjax.testing import report
from specjax.testing.compiling import compiled
from specjax.testing.laws import continuation, reader, text_law
from specjax.testing.models import ScriptedDrafter, TableModel, script_of
from specjax.testing.report import Finding
from specjax.testing.rows import EachRow, Limited, limited_params
from specjax.types import Drafter, LanguageModel, Output, Params, SamplingParams, Verifier
from specjax.verify import Block, ExactMatch, Greedy, Rejection

CHUNK = 6_144
"""Rows of a batch: a multiple of the number of rules (one, two, three or four), and few enough for a CPU's caches."""
WINDOW = 3
NEW = WINDOW + 1
"""Tokens of each row: the first window has room for a whole draft and its bonus token."""
TEXTS = 2**18
"""A joint law has no more texts than this: of all `NEW` tokens at V = 8, of the first three at V = 64."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "T = 1": {},
    "T = .7, top-p .9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 5": {"top_k": 5},
    "min-p .1": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "T = 0": {"temperature": 0.0},
    "T = 0, penalties": {"temperature": 0.0, "frequency_penalty": 0.7},
}
"""Arguments of `sampling_params`; rows of all kinds share a batch."""

SAMPLING_RULES: Mapping[str, Verifier] = {"rejection": Rejection(), "block": Block(), "exact_match": ExactMatch()}
RULES: Mapping[str, Verifier] = {**SAMPLING_RULES, "greedy": Greedy()}


SHARES = {"main, V = 8": 3.0, "main, V = 64": 0.625, "others": 1 / 16, "ngram": 1 / 80}
"""Rows of each experiment: what a row costs decides."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A target, and the joint law of what follows the prompt of each kind of row."""

    name: str
    target: LanguageModel
    params: Any
    laws: Mapping[str, np.ndarray]
    """By kind, `[V]` for each token that is tested."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the laws."""
        return next(iter(self.laws.values())).shape


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """A batch of rows of many cases: row r is judged by rule r modulo their number."""

    name: str
    source: Source
    config: DecodeConfig
    params: Params
    rules: tuple[str, ...]
    kinds: tuple[str, ...]
    """`[CHUNK]`, each row's kind."""
    limits: np.ndarray
    """`[CHUNK]`, drafted tokens at most."""


def prompt_of(kind: str) -> tuple[int, ...]:
    """The prompt of a kind of row, 2 to 6 tokens that repeat, so that an n-gram drafter has something to say."""
    index = list(KINDS).index(kind)
    return tuple([index % 4, index % 3 + 4][column % 2] for column in range(2 + index % 5))


PROMPT_WIDTH = max(len(prompt_of(kind)) for kind in KINDS)


def source_of(name: str, target: LanguageModel, params: Any) -> Source:
    """A source of rows of all kinds."""
    read, laws = reader(target), {}
    tested = max(count for count in range(1, NEW + 1) if target.vocab_size**count <= TEXTS)
    for kind, options in KINDS.items():
        model = continuation(read, params, prompt_of(kind))
        laws[kind] = text_law(model, target.vocab_size, tested, prompt_of(kind), **options)
    return Source(name=name, target=target, params=params, laws=laws)


def table_source(vocab_size: int) -> Source:
    """A Markov chain with clear preferences."""
    return source_of(f"V = {vocab_size}", TableModel(vocab_size=vocab_size), table_of(vocab_size))


def transformer_source(vocab_size: int) -> Source:
    """A transformer of two small layers."""
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=64,
    )
    params = init_params(jax.random.key(5), config, scale=0.4)
    return source_of(f"V = {vocab_size}", Transformer(config), params)


def table_of(vocab_size: int) -> jax.Array:
    """Logits `[V, V]`: larger vocabularies have sharper laws, so that many texts have a fair chance."""
    scale = 1 + 0.25 * np.log2(vocab_size / 8)
    return jnp.asarray(scale * np.random.default_rng(8).normal(size=(vocab_size, vocab_size)), jnp.float32)


# ---- Experiments: one for each kind of drafter ----


def sampled_draft(
    source: Source, rules: Mapping[str, Verifier] = SAMPLING_RULES, kinds: Sequence[str] = tuple(KINDS), **options: Any
) -> Experiment:
    """A table model drafts, whose law is near the target's."""
    size = source.target.vocab_size
    noise = np.random.default_rng(9).normal(size=(size, size))
    drafter = ModelDrafter(model=TableModel(vocab_size=size), num_tokens=WINDOW, vocab_size=size)
    params = Params(target=source.params, draft=0.7 * source.params + 0.6 * jnp.asarray(noise, jnp.float32))
    return experiment("sampled draft", source, drafter, params, rules, kinds, **options)


def scripted_draft(
    source: Source, rules: Mapping[str, Verifier] = RULES, kinds: Sequence[str] = tuple(KINDS), **options: Any
) -> Experiment:
    """Half of the rows propose the target's likeliest text, half any tokens, and no law with them."""
    drafter, random = ScriptedDrafter(num_tokens=WINDOW), np.random.default_rng(10)
    made = experiment("scripted draft", source, drafter, Params(target=source.params), rules, kinds, **options)
    likeliest = {kind: _likeliest_text(source, kind) for kind in kinds}
    texts = random.integers(0, source.target.vocab_size, (CHUNK, PROMPT_WIDTH + NEW + WINDOW), np.int32)
    for row in np.flatnonzero(follows_likeliest(made)):
        texts[row] = likeliest[made.kinds[row]]
    script = script_of(jnp.asarray(texts), WINDOW)
    params = limited_params(dataclasses.replace(made.params, draft=script), made.limits)
    return dataclasses.replace(made, params=params)


def follows_likeliest(scripted: Experiment) -> np.ndarray:
    """`[CHUNK]` bool: every other row of each rule, limit and kind."""
    groups, dealt = row_groups(scripted)[0], np.zeros(CHUNK, bool)
    for group in range(groups.max() + 1):
        dealt[np.flatnonzero(groups == group)[::2]] = True
    return dealt


def _likeliest_text(source: Source, kind: str) -> list[int]:
    text, best = list(prompt_of(kind)), np.asarray(source.params).argmax(axis=-1)
    while len(text) < PROMPT_WIDTH + NEW + WINDOW:
        text.append(int(best[text[-1]]))
    return text


def ngram_draft(
    source: Source, rules: Mapping[str, Verifier] = RULES, kinds: Sequence[str] = tuple(KINDS), **options: Any
) -> Experiment:
    """The text's own repetitions."""
    drafter = NGramDrafter(num_tokens=WINDOW, prompt_lookup_max=2)
    return experiment("ngram", source, drafter, Params(target=source.params), rules, kinds, **options)


def early_exit_draft(
    source: Source, rules: Mapping[str, Verifier] = SAMPLING_RULES, kinds: Sequence[str] = tuple(KINDS), **options: Any
) -> Experiment:
    """The target's first layer."""
    target = source.target
    if not isinstance(target, Transformer):
        raise ValueError(f"expected a transformer_source, whose layers can exit early, got {target}")
    drafter = EarlyExitDrafter(target=target, exit_layer=1, num_tokens=WINDOW)
    return experiment("early exit", source, drafter, Params(target=source.params), rules, kinds, **options)


def experiment(
    name: str,
    source: Source,
    drafter: Drafter,
    params: Params,
    rules: Mapping[str, Verifier],
    kinds: Sequence[str],
    *,
    limits: Sequence[int] = (WINDOW, WINDOW, 1, 0),
) -> Experiment:
    """Deals rules, limits and kinds out to the rows.

    Args:
      name: of the drafter.
      source: the target and its laws.
      drafter: any, for windows of `WINDOW` tokens.
      params: of target and drafter.
      rules: verifiers by name; a `Greedy` one gets rows at temperature 0 only.
      kinds: names of `KINDS`.
      limits: tokens that a row may draft at most; 0 is plain decoding through the same rule.
    """
    hands = np.arange(CHUNK) // len(rules)
    allowed = [[kind for kind in kinds if _suits(rule, kind)] for rule in rules.values()]
    row_kinds = tuple(
        allowed[row % len(rules)][hand // len(limits) % len(allowed[row % len(rules)])]
        for row, hand in enumerate(hands.tolist())
    )
    row_limits = np.asarray(limits, np.int32)[hands % len(limits)]
    config = DecodeConfig(target=source.target, drafter=Limited(drafter), verifier=EachRow(tuple(rules.values())))
    return Experiment(
        name=f"{source.name}, {name}",
        source=source,
        config=config,
        params=limited_params(params, row_limits),
        rules=tuple(rules),
        kinds=row_kinds,
        limits=row_limits,
    )


def _suits(rule: Verifier, kind: str) -> bool:
    return not isinstance(rule, Greedy) or KINDS[kind].get("temperature") == 0.0


# ---- Drawing and testing ----

Generate = Callable[..., Output]
"""`(params, key, prompt, prompt_length, sampling)` -> `NEW` tokens a row."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """What many rows wrote, by `row_groups`."""

    counts: np.ndarray
    """`[groups, texts]`, how often each text of the tested tokens came."""
    drafted: np.ndarray
    """`[groups]`."""
    accepted: np.ndarray
    """`[groups]`."""


def generator(config: DecodeConfig) -> Generate:
    """`generate`, compiled for a config."""
    return compiled(lambda *data: decode.generate(*data, config=config, max_new_tokens=NEW), level=1)


def inputs(chosen: Experiment) -> tuple[jax.Array, jax.Array, SamplingParams]:
    """Prompts `[CHUNK, P]` of all lengths, the lengths, and the rows' parameters."""
    texts = {kind: prompt_of(kind) for kind in KINDS}
    rows = {kind: [*text, *[0] * (PROMPT_WIDTH - len(text))] for kind, text in texts.items()}
    prompt = jnp.asarray([rows[kind] for kind in chosen.kinds], jnp.int32)
    length = jnp.asarray([len(texts[kind]) for kind in chosen.kinds], jnp.int32)
    return prompt, length, row_sampling([KINDS[kind] for kind in chosen.kinds], max_tokens=NEW)


def row_sampling(rows: Sequence[Mapping[str, Any]], **options: Any) -> SamplingParams:
    """`sampling_params` of rows with options of their own; what a row does not name is off, and its temperature 1."""
    plain = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    columns = {name: [row.get(name, value) for row in rows] for name, value in plain.items()}
    return sampling_params(len(rows), **columns, **options)


def draw(chosen: Experiment, rows: int, key: jax.Array, generate: Generate) -> Drawn:
    """The first tokens of at least `rows` rows.

    Raises:
      ValueError: no rows.
    """
    if rows < 1:
        raise ValueError(f"expected rows to draw, 1 or more, got {rows}")
    groups, data, shape = row_groups(chosen)[0], inputs(chosen), chosen.source.shape
    counts = np.zeros((groups.max() + 1, math.prod(shape)), np.int32)
    drafted, accepted = np.zeros((2, len(counts)), np.int64)
    for index in range(-(-rows // CHUNK)):
        found = generate(chosen.params, jax.random.fold_in(key, index), *data)
        tokens = np.asarray(found.tokens)[:, : len(shape)]
        np.add.at(counts, (groups, np.ravel_multi_index(tuple(tokens.T), shape)), 1)
        np.add.at(drafted, groups, np.asarray(found.stats.drafted))
        np.add.at(accepted, groups, np.asarray(found.stats.accepted))
    return Drawn(counts=counts, drafted=drafted, accepted=accepted)


def row_groups(chosen: Experiment) -> tuple[np.ndarray, list[tuple[str, int, str]]]:
    """The group of each row `[CHUNK]`, and the (rule, limit, kind) of each group."""
    rules = [chosen.rules[row % len(chosen.rules)] for row in range(CHUNK)]
    cases = list(zip(rules, chosen.limits.tolist(), chosen.kinds, strict=True))
    order = {case: index for index, case in enumerate(dict.fromkeys(cases))}
    return np.array([order[case] for case in cases]), list(order)


def law_tests(counts: np.ndarray, law: np.ndarray) -> dict[str, float]:
    """P-values from counts of whole texts: the joint laws of the first one, two, ... tokens, and the law of each token.

    Too few texts for a law leave its test out, unless one of them is impossible.
    """
    counts, values, places = counts.reshape(law.shape), {}, range(law.ndim)
    tests = {f"first {length}": places[length:] for length in range(1, law.ndim + 1)}
    tests |= {f"token {place + 1}": [*places[:place], *places[place + 1 :]] for place in places[1:]}
    for name, rest in tests.items():
        seen, part = counts.sum(axis=tuple(rest)), law.sum(axis=tuple(rest))
        if suffices(counts.sum(), part) or seen[part == 0].any():
            values[name] = g_test(seen, part)
    return values


def check_experiment(chosen: Experiment, rows: int, key: jax.Array, generate: Generate) -> Iterator[Finding]:
    """One finding for each rule, of all its kinds of rows, with each limit and with all; and whether there were drafts.

    Args:
      chosen: the experiment.
      rows: how many to draw, at least.
      key: typed key.
      generate: `generator(chosen.config)`.
    """
    found, cases = draw(chosen, rows, key, generate), row_groups(chosen)[1]
    own = {rule: [case[0] == rule for case in cases] for rule in chosen.rules}
    for rule in chosen.rules:
        values = {
            f"{kind}, {limit}, {test}": value
            for kind in dict.fromkeys(chosen.kinds)
            for limit, members in _limits(cases, rule, kind).items()
            for test, value in law_tests(found.counts[members].sum(axis=0), chosen.source.laws[kind]).items()
        }
        drawn = int(found.counts[own[rule]].sum())
        worst = min(values, key=values.__getitem__)
        yield report.p_value("distribution", f"{chosen.name}, {rule}", combined(values.values()), drawn, worst)
    fewest = min(own, key=lambda rule: found.drafted[own[rule]].sum())
    drafted, accepted = (int(tokens[own[fewest]].sum()) for tokens in (found.drafted, found.accepted))
    yield report.drafts(f"{chosen.name}, {fewest}", drafted, accepted)


def _limits(cases: Sequence[tuple[str, int, str]], rule: str, kind: str) -> dict[str, list[int]]:
    """Groups of a rule and kind of row, by limit, and all of them."""
    own = [index for index, case in enumerate(cases) if case[0] == rule and case[2] == kind]
    limits = {f"K = {cases[index][1]}": [index] for index in own}
    return (limits | {"any K": own} if len(limits) > 1 else limits) if own else {}


def check_distribution(rows: int, key: jax.Array, sizes: Sequence[int] = (8, 64)) -> Iterator[Finding]:
    """Every rule, drafter, kind of row and vocabulary; the main experiments (T = 1, long windows) get most rows.

    Args:
      rows: of each rule in the main experiment at V = 8; `SHARES` says what the others get.
      key: typed key.
      sizes: of the vocabularies, 8 or 64.
    """
    for size in sizes:
        keys, source = jax.random.split(jax.random.fold_in(key, size), 5), table_source(size)
        whole = range(len(source.shape) - 1, WINDOW + 1)  # all have bonus tokens to test but K = 3 at V = 64
        main = sampled_draft(source, kinds=["T = 1"], limits=whole)
        generate = generator(main.config)
        yield from check_experiment(main, math.ceil(rows * SHARES[f"main, V = {size}"]), keys[0], generate)
        yield from check_experiment(sampled_draft(source), math.ceil(rows * SHARES["others"]), keys[1], generate)
        others = [(scripted_draft(source), "others"), (ngram_draft(source), "ngram")]
        if size == 8:
            others.append((early_exit_draft(transformer_source(size)), "others"))
        for own, (chosen, share) in zip(keys[2:], others, strict=False):
            yield from check_experiment(chosen, math.ceil(rows * SHARES[share]), own, generator(chosen.config))
