"""The whole proof, and one-call entry points for verifiers and drafters of a user's own."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from specjax import decode
from specjax.compiled import pad_prompts
from specjax.decode import DecodeConfig
from specjax.sampling import sampling_params
from specjax.testing import equality, monte_carlo
from specjax.testing.drafting import check_drafts, check_output, checked_sampling
from specjax.testing.enumeration import enumerable
from specjax.testing.equality import Batch, Decoder, Subject
from specjax.testing.exactness import check_acceptance, check_joint_laws
from specjax.testing.monte_carlo import (
    CHUNK,
    SAMPLING_RULES,
    WINDOW,
    check_experiment,
    early_exit_draft,
    generator,
    inputs,
    sampled_draft,
    scripted_draft,
    table_source,
    transformer_source,
)
from specjax.testing.mutations import MUTATIONS, Mutation
from specjax.testing.report import Caught, Finding, timed
from specjax.testing.rows import EachRow
from specjax.types import Drafter, LanguageModel, Params, Verifier
from specjax.verify import Greedy

ROWS = 1_700_000
"""Rows of the main experiment unless a caller asks for more: enough to see any bias of TV .003 in one token (V = 8)."""


def sections(rows: int, key: jax.Array) -> dict[str, Iterator[Finding]]:
    """Every check of what ships, from the exact ones to the large samples; nothing runs before it is asked for.

    Args:
      rows: of the main experiments; see `check_distribution`.
      key: typed key of the samples.

    Raises:
      ValueError: no rows.
    """
    if rows < 1:
        raise ValueError(f"expected rows to draw, 1 or more, got {rows}")
    made = {
        "exact joint laws": itertools.chain(check_joint_laws(), check_joint_laws(dtype="float32"), check_acceptance()),
        "equal texts under equal keys": equality.check_equality(),
        "laws of drafts": check_shipped_drafts(-(-rows // 8), jax.random.fold_in(key, 0)),
        "laws of texts": monte_carlo.check_distribution(rows, jax.random.fold_in(key, 1)),
    }
    return {name: timed(findings) for name, findings in made.items()}


def run_checks(rows: int = ROWS, *, key: jax.Array) -> Iterator[Finding]:
    """All `sections`, one after another."""
    return itertools.chain.from_iterable(sections(rows, key).values())


def check_shipped_drafts(rows: int, key: jax.Array) -> Iterator[Finding]:
    """`check_drafts` of the drafters that sample."""
    for index, chosen in enumerate([sampled_draft(table_source(8)), early_exit_draft(transformer_source(8))]):
        own = jax.random.fold_in(key, index)
        yield from check_drafts(chosen.name, chosen.config, chosen.params, inputs(chosen), rows, own)


# ---- Mutations ----


def _probe_distribution() -> Iterator[Finding]:
    chosen = sampled_draft(table_source(8), kinds=["T = 1"])
    return check_experiment(chosen, 100_000, jax.random.key(0), generator(chosen.config))


def _probe_texts(check: Callable[[Subject], Iterator[Finding]]) -> Callable[[], Iterator[Finding]]:
    def probe() -> Iterator[Finding]:
        for name in ("transformer, script", "model"):
            yield from equality.checked(name, [check])

    return probe


PROBES: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "enumeration": check_joint_laws,
    "acceptance": check_acceptance,
    "drafts": lambda: check_shipped_drafts(20 * CHUNK, jax.random.key(0)),
    "distribution": _probe_distribution,
    "tokens": _probe_texts(equality.check_tokens),
    "rows": _probe_texts(equality.check_rows),
}
"""What hunts a mutation: each check, no larger than it has to be."""


def hunt(mutation: Mutation) -> Caught:
    """Runs the check that should reject a mutation, then the others, until one does."""
    start, caught = time.perf_counter(), None
    with mutation.applied():
        for check in dict.fromkeys([mutation.expected, *PROBES]):
            caught = next((finding for finding in PROBES[check]() if not finding.passed), None)
            if caught is not None:
                break
    seconds = time.perf_counter() - start
    return Caught(mutation=mutation.name, expected=mutation.expected, finding=caught, seconds=seconds)


def run_mutations(mutations: Sequence[Mutation] = MUTATIONS) -> Iterator[Caught]:
    """What became of each mutation."""
    return map(hunt, mutations)


# ---- A strategy of the user's own ----


def check_verifier(verifier: Verifier, *, rows: int = ROWS, key: jax.Array) -> Iterator[Finding]:
    """Every check that a verifier can be put to.

    It is enumerated if it is a `CoinRule` (or an `ExactMatch` or `Greedy`), sampled with sampled and scripted drafts,
    and decoded in other orders, batches and chunks.

    Args:
      verifier: any; a subclass of `Greedy` gets rows at temperature 0 only.
      rows: of the main experiment.
      key: typed key of the samples.

    Returns:
      The findings as they come; the verifier keeps the target's law, as far as can be seen, if each has `passed`.
    """
    return timed(_verifier_findings(verifier, rows, key))


def _verifier_findings(verifier: Verifier, rows: int, key: jax.Array) -> Iterator[Finding]:
    rules, source = {type(verifier).__name__: verifier}, table_source(8)
    if enumerable(verifier):
        yield from check_joint_laws(rules)
        yield from check_joint_laws(rules, dtype="float32")
    chosen = sampled_draft(source, rules)
    generate = generator(chosen.config)
    yield from check_experiment(chosen, -(-rows // 16), jax.random.fold_in(key, 0), generate)
    if not isinstance(verifier, Greedy):
        chosen = sampled_draft(source, rules, ["T = 1"], limits=(WINDOW,))
        yield from check_experiment(chosen, rows, jax.random.fold_in(key, 1), generate)
    chosen = scripted_draft(source, rules)
    yield from check_experiment(chosen, -(-rows // 16), jax.random.fold_in(key, 2), generator(chosen.config))
    texts = equality.subject("script", equality.history_target(), None, rules=rules)
    yield from equality.exactly(texts, [equality.check_tokens, equality.check_rows, equality.check_shapes])


def check_drafter(
    drafter: Drafter,
    params: Params,
    *,
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    rows: int = 10_000,
    batch_size: int = 48,
    sampling: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Every check that a drafter can be put to with a target of any size.

    The laws that it reports are those that it draws from; under every rule the output follows the target's law; under
    `ExactMatch` it is the text of plain decoding; and no row depends on another, nor on prompt chunks or pauses.

    Args:
      drafter: any.
      params: weights of target and drafter.
      target: the model whose law is kept.
      prompts: token lists, which take turns in the batch.
      key: typed key of the samples.
      rows: drafts and texts to draw, at least.
      batch_size: rows of a call, a multiple of 3.
      sampling: arguments of `sampling_params` other than lengths and stop ids; the temperature is 1 unless given.

    Returns:
      The findings as they come; nothing was found against the drafter if each has `passed`.
    """
    if batch_size % len(SAMPLING_RULES) or batch_size < 2 * len(SAMPLING_RULES):
        raise ValueError(f"expected a batch_size of 6, 9, 12, ... rows, as many for each rule, got {batch_size}")
    options = checked_sampling(sampling or {})
    verifier = EachRow(tuple(SAMPLING_RULES.values()))
    config = DecodeConfig(target=target, drafter=drafter, verifier=verifier)
    turns = pad_prompts([prompts[row % len(prompts)] for row in range(batch_size)])
    return timed(_drafter_findings(config, params, turns, options, rows, key))


def _drafter_findings(
    config: DecodeConfig,
    params: Params,
    prompts: tuple[jax.Array, jax.Array],
    options: Mapping[str, Any],
    rows: int,
    key: jax.Array,
) -> Iterator[Finding]:
    name, new = type(config.drafter).__name__, 4 * (config.drafter.num_tokens + 1)
    keys = jax.random.split(key, 3)
    sampling = sampling_params(len(prompts[0]), **options, max_tokens=new)
    data = *prompts, sampling
    yield from check_drafts(name, config, params, data, rows, keys[0])
    yield from check_output(name, config, params, data, rows, keys[1], tuple(SAMPLING_RULES))
    batch = Batch(
        params=params,
        keys=jax.random.split(keys[2], len(prompts[0])),
        prompt=prompts[0],
        length=prompts[1],
        sampling=sampling,
    )
    with jax.default_matmul_precision("highest"):
        plain, decoder = Decoder(decode.without_speculation(config), new).run(batch), Decoder(config, new)
    texts = Subject(name=name, config=config, batch=batch, plain=plain, rules=SAMPLING_RULES, decoder=decoder)
    yield from equality.exactly(texts, [equality.check_tokens, equality.check_rows, equality.check_shapes])
