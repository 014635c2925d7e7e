"""What a check found, and a run of the kit as a table and as JSON."""

import dataclasses
import enum
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

from specjax.report.goodness_of_fit import SIGNIFICANCE


class Measure(enum.StrEnum):
    """What a finding counts in."""

    P_VALUE = "p-value"
    """Of the sample, if nothing is wrong: it fails below its limit."""
    ERROR = "error"
    """A difference of exact numbers: it fails above its limit."""
    DIFFERENCES = "differences"
    """Rows that are not what they must be: it fails above 0."""
    TOKENS = "tokens"
    """Tokens that had to be drafted for anything to be tested: it fails below 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found about one case."""

    check: str
    case: str
    measure: Measure
    value: float
    limit: float
    count: int
    """Laws, rows or texts that were looked at."""
    detail: str = ""
    """Where the worst was found."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the value is on the right side of its limit; NaN is on neither."""
        least = self.measure in (Measure.P_VALUE, Measure.TOKENS)
        return self.value >= self.limit if least else self.value <= self.limit


def p_value(check: str, case: str, value: float, count: int, detail: str = "") -> Finding:
    """A finding about a sample."""
    limit = SIGNIFICANCE
    return Finding(
        check=check, case=case, measure=Measure.P_VALUE, value=value, limit=limit, count=count, detail=detail
    )


def error(check: str, case: str, value: float, limit: float, count: int, detail: str = "") -> Finding:
    """A finding about exact numbers."""
    return Finding(check=check, case=case, measure=Measure.ERROR, value=value, limit=limit, count=count, detail=detail)


def differences(check: str, case: str, value: int, count: int, detail: str = "") -> Finding:
    """A finding about rows that must agree."""
    measure = Measure.DIFFERENCES
    return Finding(check=check, case=case, measure=measure, value=value, limit=0, count=count, detail=detail)


def drafts(case: str, drafted: int, accepted: int) -> Finding:
    """A finding about whether there was anything to verify: without drafts everything passes."""
    case, detail = f"{case}: {accepted:,} accepted", "nothing was drafted, so nothing was verified"
    return Finding(
        check="drafted", case=case, measure=Measure.TOKENS, value=drafted, limit=1, count=drafted, detail=detail
    )


def timed(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The same, each with the time it took."""
    start = time.perf_counter()
    for finding in findings:
        yield dataclasses.replace(finding, seconds=time.perf_counter() - start)
        start = time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caught:
    """What became of a mutation."""

    mutation: str
    expected: str
    """The check that was expected to reject it."""
    finding: Finding | None
    """What did reject it; None: it survived every check."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it was rejected."""
        return self.finding is not None


def finding_table(findings: Sequence[Finding]) -> Table:
    """One line for each finding."""
    table = Table("check", "case", "measure", "value", "limit", "of", "s", "")
    for item in findings:
        verdict = "" if item.passed else f"FAILED {item.detail}"
        numbers = f"{item.value:.2g}", f"{item.limit:g}", f"{item.count:,}", f"{item.seconds:.1f}"
        table.add_row(item.check, item.case, item.measure, *numbers, verdict)
    return table


def mutation_table(caught: Sequence[Caught]) -> Table:
    """One line for each mutation."""
    table = Table("mutation", "caught by", "case", "value", "s", "")
    for item in caught:
        found = item.finding
        row = ("-", "-", "-") if found is None else (found.check, found.case, f"{found.measure} {found.value:.2g}")
        note = "SURVIVED" if found is None else "" if found.check == item.expected else f"expected {item.expected}"
        table.add_row(item.mutation, *row, f"{item.seconds:.1f}", note)
    return table


def record(findings: Sequence[Finding], caught: Sequence[Caught], *, finished: bool, **settings: Any) -> dict[str, Any]:
    """A run for JSON: it has passed if it is `finished` and nothing in it failed."""
    return {
        "finished": finished,
        "passed": finished and all(item.passed for item in (*findings, *caught)),
        "settings": settings,
        "environment": {
            "jax": jax.__version__,
            "devices": [device.device_kind for device in jax.devices()],
            "prng": str(jax.random.key_impl(jax.random.key(0))),
        },
        "findings": [dataclasses.asdict(item) | {"passed": item.passed} for item in findings],
        "mutations": [dataclasses.asdict(item) | {"passed": item.passed} for item in caught],
    }
