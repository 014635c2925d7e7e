"""Each mutation is rejected; nothing stays broken behind it."""

import pathlib
import re

import pytest

from specjax import cache, decode, verify
from specjax.drafters.model import ModelDrafter
from specjax.models import attention, transformer
from specjax.testing import MUTATIONS
from specjax.testing.kit import PROBES, hunt
from specjax.testing.mutations import Mutation
from specjax.verify import Block, Rejection


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation, record_property):
    caught = hunt(mutation)
    record_property("caught_by", caught.finding and f"{caught.finding.check}: {caught.finding.case}")
    assert caught.passed
    assert not caught.finding.passed
    assert caught.finding.check == mutation.expected == documented()[mutation.name]


def documented() -> dict[str, str]:
    """The table of docs/testing.md: the check that rejects each mutation."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(\w+)` \|$", page.split("| mutation | rejected by |")[1], re.MULTILINE)
    return {name: check for names, check in rows for name in names.split("; ")}


def test_the_docs_name_no_others():
    assert set(documented()) == {mutation.name for mutation in MUTATIONS}


def test_the_probe_of_texts_laws_finds_nothing_in_what_ships():
    """Or it would catch every mutation. Other tests run the other probes: of drafts, laws and texts that ship."""
    findings = list(PROBES["distribution"]())
    assert findings
    assert all(finding.passed for finding in findings)


def test_there_are_enough():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) == 15 + 6
    assert sum(name.split(":")[0] in ("bonus", "cache", "mask", "off by one", "EOS", "padding") for name in names) == 6


def test_what_does_no_harm_survives(monkeypatch):
    """And is reported as such, after every check has looked at it."""
    seen = []

    def probe(name):
        def run():
            seen.append(name)
            yield from ()

        return run

    monkeypatch.setattr("specjax.testing.kit.PROBES", {name: probe(name) for name in ("drafts", "enumeration", "rows")})
    harmless = Mutation(name="none", expected="enumeration", patches=((verify, "residual", lambda original: original),))
    caught = hunt(harmless)
    assert not caught.passed
    assert caught.finding is None
    assert seen == ["enumeration", "drafts", "rows"]


def test_patches_end_with_their_block():
    owners = (verify, decode, cache, attention, transformer, Block, Rejection, ModelDrafter)
    before = [dict(vars(owner)) for owner in owners]
    for mutation in MUTATIONS:
        with mutation.applied():
            assert [dict(vars(owner)) for owner in owners] != before
        assert [dict(vars(owner)) for owner in owners] == before
    with pytest.raises(KeyError), MUTATIONS[0].applied():
        raise KeyError
    assert [dict(vars(owner)) for owner in owners] == before
