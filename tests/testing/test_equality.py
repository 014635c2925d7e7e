"""Equal texts under equal keys: of what ships there is none that differs, and the rows hold what they should."""

import functools

import jax
import numpy as np
import pytest

from specjax.testing import equality
from specjax.testing.equality import KINDS, ROWS, SUBJECTS, WINDOW, check_equality, script_kinds


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Each of the subjects, with what it has compiled and decoded."""
    with pytest.MonkeyPatch.context() as patch:
        for name, make in SUBJECTS.items():
            patch.setitem(SUBJECTS, name, functools.cache(make))
        yield


@pytest.mark.parametrize("name", SUBJECTS)
def test_texts_are_equal(name):
    findings = list(check_equality([name]))
    assert {finding.check for finding in findings} >= {"tokens", "rows"}
    assert [finding for finding in findings if not finding.passed] == []
    assert min(finding.count for finding in findings) > 3


@pytest.fixture(scope="module")
def script() -> equality.Subject:
    return SUBJECTS["script"]()


def test_rows_hold_every_case(script):
    """Every rule with every K, script and kind of sampling; some rows stop early."""
    rules, limits, kinds = script.row_rules, script.limits, np.arange(ROWS) // 4 % len(KINDS)
    assert set(zip(rules, limits, script_kinds(), strict=True)) == {
        (rule, limit, kind) for rule in script.rules for limit in range(WINDOW + 1) for kind in range(4)
    }
    assert set(zip(rules, kinds, strict=True)) == {(rule, kind) for rule in script.rules for kind in range(len(KINDS))}
    lengths, stretched = np.asarray(script.batch.length), np.asarray(script.batch.sampling.min_tokens) > 0
    for rule in script.rules:
        assert set(lengths[rules == rule]) == set(range(1, 17))
        assert set(limits[(rules == rule) & stretched]) == set(range(WINDOW + 1))
    assert set(script.plain.finish_reason.tolist()) == {1, 2}
    assert np.ptp(script.plain.length) > 10
    greedy = np.asarray(script.batch.sampling.temperature) == 0
    assert greedy[rules == "greedy"].all()
    assert 0 < greedy[rules == "rejection"].sum() < (rules == "rejection").sum()


def test_scripts_are_what_their_names_say(script):
    drafted = np.asarray(script.batch.params.draft["draft"].tokens)
    for row in range(ROWS):
        start, right = int(script.batch.length[row]), script.plain.tokens[row, 0]
        first = drafted[row, start, 0]
        assert (first == right) == (script_kinds()[row] == 0) or script_kinds()[row] > 1


def test_one_wrong_token_is_a_difference(script):
    found = script.plain
    assert not equality.differing(found, found).any()
    for name, place in (("tokens", (3, 2)), ("length", 3), ("finish_reason", 3)):
        changed = np.array(getattr(found, name))
        changed[place] += 1
        assert np.flatnonzero(equality.differing(found.replace(**{name: changed}), found)).tolist() == [3]


def test_rows_can_be_taken_in_any_order(script):
    index = np.array([5, 2, 2])
    taken = script.batch.rows(index)
    np.testing.assert_array_equal(jax.random.key_data(taken.keys), jax.random.key_data(script.batch.keys[index]))
    np.testing.assert_array_equal(taken.prompt, script.batch.prompt[index])
    np.testing.assert_array_equal(taken.params.draft["limit"], script.limits[index])
    np.testing.assert_array_equal(taken.params.draft["draft"].tokens, script.batch.params.draft["draft"].tokens[index])
    assert taken.params.target is script.batch.params.target
