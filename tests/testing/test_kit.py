"""The entry points for a user's own strategies, and the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from specjax.testing import __main__ as command
from specjax.testing import check_drafter, check_verifier, kit, report
from specjax.testing.models import HistoryModel, TableDrafter, history_params
from specjax.testing.report import Caught, Measure
from specjax.types import Draft, Params
from specjax.verify import Greedy, Rejection

KEY = jax.random.key(0)


# ---- Verifiers ----


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """Rejection with a scale on its coins, and no pure functions: all that can be done is to sample it."""

    leniency: float = 1.0

    def draft_keys(self, keys, start, num_tokens):
        return Rejection().draft_keys(keys, start, num_tokens)

    def __call__(self, keys, start, draft, log_probs):
        return Rejection()(keys, start, draft, log_probs + jnp.log(self.leniency))


def test_a_right_verifier_of_the_users_own_passes():
    findings = list(check_verifier(Wrapped(), rows=30_000, key=KEY))
    assert {finding.check for finding in findings} == {"tokens", "rows", "distribution", "drafted"}
    assert [finding for finding in findings if not finding.passed] == []
    assert all(finding.seconds >= 0 and finding.case for finding in findings)


def test_a_wrong_verifier_without_pure_functions_is_rejected_by_sampling():
    failed = next(check_verifier(Wrapped(1.3), rows=400_000, key=KEY))
    assert (failed.check, failed.passed, failed.measure) == ("distribution", False, Measure.P_VALUE)


@dataclasses.dataclass(frozen=True)
class Generous(Rejection):
    """A coin rule that accepts a little too much."""

    def chances(self, draft, log_probs):
        return jnp.minimum(1.01 * super().chances(draft, log_probs), 1)


def test_a_wrong_coin_rule_is_rejected_exactly():
    failed = next(check_verifier(Generous(), key=KEY))
    assert (failed.check, failed.passed, failed.measure) == ("enumeration", False, Measure.ERROR)
    assert failed.detail


def test_greedy_is_checked_at_temperature_0(monkeypatch):
    """What it is put to; that Greedy passes is what the experiments of what ships and test_equality.py find."""
    sampled, texts = [], []
    monkeypatch.setattr(kit, "check_experiment", lambda chosen, *_: sampled.append(chosen) or iter(()))
    monkeypatch.setattr(kit.equality, "subject", lambda *_, rules: rules)
    monkeypatch.setattr(kit.equality, "exactly", lambda *given: texts.append(given) or iter(()))
    findings = list(check_verifier(Greedy(), rows=10, key=KEY))
    assert {finding.check for finding in findings} == {"enumeration"}
    assert [finding for finding in findings if not finding.passed] == []
    assert [chosen.name for chosen in sampled] == ["V = 8, sampled draft", "V = 8, scripted draft"]
    assert all(set(chosen.kinds) == {"T = 0", "T = 0, penalties"} for chosen in sampled)
    checks = [kit.equality.check_tokens, kit.equality.check_rows, kit.equality.check_shapes]
    assert texts == [({"Greedy": Greedy()}, checks)]


# ---- Drafters ----

TARGET = HistoryModel(vocab_size=11)
PARAMS = Params(target=history_params(3), draft=0.5 * jax.random.normal(jax.random.key(1), (11, 11)))
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warm(TableDrafter):
    """Draws at the row's temperature and reports the law at another."""

    def propose(self, params, keys, context, sampling) -> Draft:
        drawn = super().propose(params, keys, context, sampling)
        return drawn.replace(log_probs=jax.nn.log_softmax(0.5 * drawn.log_probs))


def test_a_right_drafter_of_the_users_own_passes():
    drafter = TableDrafter(num_tokens=2)
    findings = list(check_drafter(drafter, PARAMS, target=TARGET, prompts=PROMPTS, key=KEY, rows=5_000))
    assert [finding.check for finding in findings[:5]] == ["drafts", "output", "output", "output", "drafted"]
    assert {finding.check for finding in findings} == {"drafts", "output", "drafted", "tokens", "rows"}
    assert [finding for finding in findings if not finding.passed] == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(TableDrafter):
    """Proposes nothing."""

    sampled: bool

    def propose(self, params, keys, context, sampling) -> Draft:
        drawn = super().propose(params, keys, context, sampling)
        return drawn.replace(length=jnp.zeros_like(drawn.length), log_probs=drawn.log_probs if self.sampled else None)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_drafter_that_proposes_nothing_is_no_pass(sampled):
    found = check_drafter(
        Silent(num_tokens=2, sampled=sampled), PARAMS, target=TARGET, prompts=PROMPTS, key=KEY, rows=1_000
    )
    findings = [next(found) for _ in range(1 if sampled else 4)]
    assert {finding.check for finding in findings if finding.passed} == (set() if sampled else {"output"})
    assert [finding.check for finding in findings if not finding.passed] == ["drafted"]


def test_a_drafter_that_reports_another_law_is_rejected():
    drafter = Warm(num_tokens=2)
    found = check_drafter(drafter, PARAMS, target=TARGET, prompts=PROMPTS, key=KEY, rows=20_000, batch_size=1200)
    by_check = {}
    for finding in found:
        by_check.setdefault(finding.check, []).append(finding)
        if finding.check == "drafted":
            break
    assert not by_check["drafts"][0].passed
    passed = {finding.case.split(", ")[1]: finding.passed for finding in by_check["output"]}
    assert passed == {"rejection": False, "block": False, "exact_match": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nosy(TableDrafter):
    """A row drafts what its neighbour drew."""

    def propose(self, params, keys, context, sampling) -> Draft:
        drawn = super().propose(params, keys, context, sampling)
        return jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), drawn)


def test_a_drafter_that_mixes_rows_up_is_rejected():
    """Its output follows the law all the same: rows are alike. But a text depends on its neighbours."""
    drafter, prompts = Nosy(num_tokens=2), PROMPTS[:1]
    found = check_drafter(drafter, PARAMS, target=TARGET, prompts=prompts, key=KEY, rows=3_000, batch_size=300)
    failed = next(finding for finding in found if not finding.passed)
    assert (failed.check, failed.case) == ("rows", "Nosy, order")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 4}, "batch_size of 6, 9, 12"), ({"sampling": {"stop_token_ids": [1]}}, "leave lengths alone")],
)
def test_what_cannot_be_checked_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_drafter(TableDrafter(num_tokens=2), PARAMS, target=TARGET, prompts=PROMPTS, key=KEY, **options)


# ---- The command ----


def sections(passed: bool):
    def make(rows, key):
        found = report.p_value("distribution", f"{rows} rows", 0.5 if passed else 1e-9, rows, "worst here")
        return {"laws": iter([report.error("enumeration", "rejection", 1e-17, 1e-12, 64), found])}

    return make


@pytest.mark.parametrize(("passed", "survived"), [(True, False), (False, False), (True, True)])
def test_command_reports_and_exits(monkeypatch, capsys, tmp_path, passed, survived):
    rejected = report.differences("tokens", "script", 3, 10)
    caught = Caught(mutation="mask", expected="rows", finding=None if survived else rejected, seconds=1.0)
    monkeypatch.setattr(command, "sections", sections(passed))
    monkeypatch.setattr(command, "run_mutations", lambda: iter([caught]))
    status = command.main(["--rows", "1e5", "--seed", "3", "--output", str(tmp_path / "report.json")])
    assert status == (not passed or survived)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["passed"] == (status == 0)
    assert written["settings"]["rows"] == 100_000
    assert [finding["passed"] for finding in written["findings"]] == [True, passed]
    assert written["mutations"][0]["passed"] != survived
    printed = capsys.readouterr().out
    assert "100000 rows" in printed
    assert ("SURVIVED" in printed) == survived
    assert ("worst here" in printed) != passed


@pytest.mark.parametrize("rows", ["0", "-5", "1.5", "nan", "many"])
def test_command_refuses_rows_that_are_none(capsys, rows):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--rows", rows])
    assert f"expected a whole number of rows, 1 or more, got {rows}" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "sections", None)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--output", str(tmp_path / "missing" / "report.json")])
    assert "expected an --output that can be written" in capsys.readouterr().err


def test_what_was_found_is_kept_if_a_check_breaks(monkeypatch, tmp_path):
    """And is no pass."""

    def breaks(rows, key):
        def findings():
            yield report.differences("tokens", "script", 0, 10)
            raise RuntimeError("out of memory")

        return {"texts": findings()}

    monkeypatch.setattr(command, "sections", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        command.main(["--output", str(tmp_path / "report.json")])
    written = json.loads((tmp_path / "report.json").read_text())
    assert [finding["check"] for finding in written["findings"]] == ["tokens"]
    assert (written["finished"], written["passed"]) == (False, False)


def test_findings_fail_on_the_right_side():
    assert report.p_value("a", "b", 1e-4, 1).passed
    assert not report.p_value("a", "b", 0.99e-4, 1).passed
    assert not report.p_value("a", "b", float("nan"), 1).passed
    assert report.error("a", "b", 1e-12, 1e-12, 1).passed
    assert not report.error("a", "b", 2e-12, 1e-12, 1).passed
    assert not report.error("a", "b", float("nan"), 1e-12, 1).passed
    assert not report.differences("a", "b", 1, 1).passed
    assert report.drafts("a", 1, 0).passed
    assert not report.drafts("a", 0, 0).passed
