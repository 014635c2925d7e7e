"""The three levels of losslessness: what was compared, the verdict on it, and both as tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from specjax.report.divergence import Divergence, finite, step
from specjax.report.goodness_of_fit import SIGNIFICANCE, GTest, uniformity_test
from specjax.report.table import show

MEAN_VARIATION = {"float32": 1e-4, "bfloat16": 5e-2}
"""Total variation between the laws of both readings that rounding explains, as a mean over the text. At single places
it can be as much as a token's probability, where that token lies at the edge of a filter."""
BIT_STEPS = {"float32": 256, "bfloat16": 8}
"""Difference between the logits of both readings that rounding explains, in steps of the dtype at the largest logit:
sums over all layers, and the worst of all ids."""

VERDICTS = {True: "passed", False: "FAILED", None: "not judged"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextCheck:
    """Texts of one window size beside plain ones, under the same keys."""

    num_prompts: int
    num_tokens: int
    """Output tokens compared: those of a prompt up to its first divergence."""
    num_draft_tokens: int
    num_accepted_tokens: int
    divergences: tuple[Divergence, ...]
    logit_differences: np.ndarray
    """`[n]`, at each plain output token: the largest difference of two logits of one id, read both ways."""
    magnitudes: np.ndarray
    """`[n]`, the largest plain logit."""
    total_variations: np.ndarray
    """`[n]`, between the processed laws, read both ways."""
    places: np.ndarray
    """`[m]`, where each token written with drafts falls in its law (`goodness_of_fit.places`); empty: not computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleCheck:
    """First tokens of one prompt under many keys."""

    num_rows: int
    """Of speculative decoding; plain decoding drew as many."""
    num_draft_tokens: int
    num_accepted_tokens: int
    tests: Mapping[str, GTest]
    """By what they compare."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on one level."""

    level: str
    passed: bool | None
    """None: not judged."""
    summary: str
    numbers: Mapping[str, Any]


def pool_texts(checks: Sequence[TextCheck]) -> TextCheck:
    """Puts the checks of several batches together."""
    fields = [field.name for field in dataclasses.fields(TextCheck)]
    columns = {name: [getattr(check, name) for check in checks] for name in fields}
    return TextCheck(**{name: _join(values) for name, values in columns.items()})


def _join(values: Sequence[Any]) -> Any:
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else sum(values[1:], values[0])


def judge_distribution(sample: SampleCheck | None, text: TextCheck, *, dtype: str, greedy: bool) -> Judgement:
    """Is the law of the output that of plain decoding?

    Args:
      sample: None if nothing was drawn.
      text: for the laws at each place of the plain text, and for the places of the other text's tokens in theirs.
      dtype: of the weights.
      greedy: each law is certain of one token.
    """
    mean = float(text.total_variations.mean()) if text.total_variations.size else 0.0
    largest = float(text.total_variations.max(initial=0))
    numbers: dict[str, Any] = {
        "num_laws": text.total_variations.size,
        "mean_total_variation": finite(mean),
        "max_total_variation": finite(largest),
    }
    if greedy:
        return Judgement(
            level="distribution",
            passed=None,
            summary=f"a greedy law is certain: level tokens judges it; read in windows the likeliest token is another "
            f"one at {mean:.3%} of {numbers['num_laws']:,} places",
            numbers=numbers,
        )
    laws = f"TV of laws {mean:.2g} on average (allowed {MEAN_VARIATION[dtype]:g}), {largest:.2g} at most"
    placed = uniformity_test(text.places)
    tests: Mapping[str, GTest] = {} if sample is None or not sample.num_draft_tokens else sample.tests
    verdicts = [test.passed for test in tests.values()] + [placed.passed] * (text.num_draft_tokens > 0)
    if sample is not None:
        numbers |= {name: getattr(sample, name) for name in ("num_rows", "num_draft_tokens", "num_accepted_tokens")}
        numbers["tests"] = {name: _test_record(test) for name, test in sample.tests.items()}
    numbers["places"] = {"num_tokens": text.places.size, **_test_record(placed)}
    passed = _all(verdicts) if mean <= MEAN_VARIATION[dtype] else False
    found = f"{_tests(sample)}; {text.places.size:,} tokens in their laws {_value(placed)}; {laws}"
    return Judgement(level="distribution", passed=passed, summary=found, numbers=numbers)


def _test_record(test: GTest) -> dict[str, Any]:
    return {**dataclasses.asdict(test), "statistic": finite(test.statistic)}


def _tests(sample: SampleCheck | None) -> str:
    if sample is None:
        return "no keys were drawn"
    if not sample.num_draft_tokens:
        return f"nothing was drafted in {sample.num_rows:,} rows"
    values = [f"{name} {_value(test)}" for name, test in sample.tests.items()]
    return (
        f"{sample.num_rows:,} rows, {sample.num_draft_tokens:,} drafted, {sample.num_accepted_tokens:,} accepted; "
        f"p-values (fail below {SIGNIFICANCE:g}): {', '.join(values)}"
    )


def _value(test: GTest) -> str:
    return "(too few)" if test.p_value is None else f"{test.p_value:.2g}"


def judge_tokens(text: TextCheck, *, promised: bool) -> Judgement:
    """Are the tokens those of plain decoding, except where rounding decides?

    Args:
      text: what was compared.
      promised: whether this verifier promises equal tokens.
    """
    beyond = [divergence for divergence in text.divergences if not divergence.within_rounding]
    equal = text.num_prompts - len(text.divergences)
    numbers = {
        "num_prompts": text.num_prompts,
        "num_equal_prompts": equal,
        "num_tokens": text.num_tokens,
        "num_draft_tokens": text.num_draft_tokens,
        "num_accepted_tokens": text.num_accepted_tokens,
        "num_divergences": len(text.divergences),
        "num_beyond_rounding": len(beyond) if promised else None,
    }
    found = (
        f"{equal:,} of {text.num_prompts:,} prompts equal, {text.num_tokens:,} tokens compared, "
        f"{text.num_draft_tokens:,} drafted, {text.num_accepted_tokens:,} accepted"
    )
    if not promised:
        return Judgement(level="tokens", passed=None, summary=f"not promised here: {found}", numbers=numbers)
    found += f"; {len(text.divergences)} divergences, {len(beyond)} beyond rounding"
    if beyond:
        summary = f"{found}, the first one at {describe(beyond[0])}"
        return Judgement(level="tokens", passed=False, summary=summary, numbers=numbers)
    if not text.num_draft_tokens:
        return Judgement(level="tokens", passed=None, summary=f"nothing to verify: {found}", numbers=numbers)
    return Judgement(level="tokens", passed=True, summary=found, numbers=numbers)


def judge_bits(text: TextCheck, *, dtype: str) -> Judgement:
    """Are the logits those of plain decoding, up to rounding?"""
    differences = text.logit_differences
    if not differences.size:
        return Judgement(level="bits", passed=None, summary="there is no output to read", numbers={"num_places": 0})
    allowed = BIT_STEPS[dtype] * np.array([step(dtype, magnitude) for magnitude in text.magnitudes])
    inside = differences <= allowed
    worst = int((differences / allowed).argmax())
    numbers = {
        "num_places": differences.size,
        "num_equal_places": int((differences == 0).sum()),
        "num_beyond_rounding": int((~inside).sum()),
        "max_logit_difference": finite(differences.max()),
        "max_logit": finite(text.magnitudes.max()),
    }
    summary = (
        f"{differences.size:,} places: all logits equal at {numbers['num_equal_places']:,}, beyond rounding at "
        f"{numbers['num_beyond_rounding']:,}; worst {differences[worst]:.2g} of {allowed[worst]:.2g}"
    )
    return Judgement(level="bits", passed=bool(inside.all()), summary=summary, numbers=numbers)


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    """Of those that were given; None if none was."""
    given = [verdict for verdict in verdicts if verdict is not None]
    return all(given) if given else None


def describe(divergence: Divergence) -> str:
    """A divergence in one line."""
    tokens = [
        "nothing" if token is None else f"{token} {text!r}"
        for token, text in (
            (divergence.plain_id, divergence.plain_text),
            (divergence.other_id, divergence.other_text),
        )
    ]
    gap = "" if divergence.gap is None else f", gap {divergence.gap:.3g} (allowed {divergence.allowed:.3g})"
    place = f"id {divergence.prompt_id!r}, output token {divergence.index}"
    return f"{place}: {tokens[0]} plainly, {tokens[1]} with drafts{gap}"


def divergence_record(divergence: Divergence) -> dict[str, Any]:
    """A divergence for JSON."""
    return {**dataclasses.asdict(divergence), "within_rounding": divergence.within_rounding}


def level_table(judgements: Mapping[int, Sequence[Judgement]]) -> Table:
    """One line for each K and level.

    Args:
      judgements: by K.
    """
    table = Table("K", "level", "verdict", "found")
    for window, levels in judgements.items():
        for judgement in levels:
            table.add_row(str(window), judgement.level, VERDICTS[judgement.passed], escape(judgement.summary))
        table.add_section()
    return table


def divergence_table(texts: Mapping[int, TextCheck]) -> Table:
    """One line for each first divergence.

    Args:
      texts: by K.
    """
    table = Table("K", "prompt", "output\ntoken", "plain", "drafted", "gap", "top-2\ngap", "filter\nedge", "allowed")
    for window, text in texts.items():
        for item in text.divergences:
            tokens = [
                "-" if token is None else escape(f"{token} {piece!r}")
                for token, piece in ((item.plain_id, item.plain_text), (item.other_id, item.other_text))
            ]
            gaps = [show(value) for value in (item.gap, item.top2_gap, item.edge, item.allowed)]
            table.add_row(str(window), escape(str(item.prompt_id)), str(item.index), *tokens, *gaps)
    return table


def failures(judgements: Mapping[int, Sequence[Judgement]]) -> list[str]:
    """One line for each level that failed.

    Args:
      judgements: by K.
    """
    return [
        f"K = {window}, {judgement.level}: {judgement.summary}"
        for window, levels in judgements.items()
        for judgement in levels
        if judgement.passed is False
    ]


def unjudged(judgements: Mapping[int, Sequence[Judgement]]) -> list[int]:
    """Each K at which neither the law nor the tokens of the output were judged; logits say nothing about drafts.

    Args:
      judgements: by K.
    """
    return [
        window
        for window, levels in judgements.items()
        if all(judgement.passed is None for judgement in levels if judgement.level != "bits")
    ]


def outcome(judgements: Mapping[int, Sequence[Judgement]]) -> bool | None:
    """Whether everything passed; None: nothing failed, but at some K the output was not judged.

    Args:
      judgements: by K.
    """
    if failures(judgements):
        return False
    return None if unjudged(judgements) else True


def verdict(judgements: Mapping[int, Sequence[Judgement]]) -> str:
    """What failed, a line each; or where nothing was judged; or how many verdicts passed, and how many there are not.

    Args:
      judgements: by K.
    """
    failed, silent = failures(judgements), unjudged(judgements)
    if failed:
        return "\n".join(f"failed: {line}" for line in failed)
    if silent:
        return f"not judged: neither law nor tokens at K = {', '.join(map(str, silent))}"
    verdicts = [judgement.passed for levels in judgements.values() for judgement in levels]
    return f"passed: {verdicts.count(True)} of {len(verdicts)} verdicts, {verdicts.count(None)} not judged"
