"""Every driver writes a single device's text: each pair of settings meets here; `texts.py` alone runs all of them.

Cases 26, 50, 58 and 62 on meshes are found by the same program.
"""

import itertools

import numpy as np
import pytest
import worlds

from specjax.types import FinishReason

COMBINATIONS = [
    ("shard_map", 2, 1, 2, "exact_match", "ngram", "generate"),
    ("shard_map", 1, 2, 1, "greedy", "model", "generate"),
    ("shard_map", 2, 4, 4, "exact_match", "model_sharded", "generate"),
    ("shard_map", 1, 8, 2, "greedy", "early_exit", "steps"),
    ("jit", 2, 1, 1, "greedy", "model_sharded", "generate"),
    ("jit", 2, 2, 4, "exact_match", "early_exit", "generate"),
    ("jit", 1, 4, 2, "greedy", "model", "steps"),
    ("jit", 1, 8, 1, "exact_match", "ngram", "generate"),
    ("pmap", 1, 1, 4, "greedy", "early_exit", "steps"),
    ("pmap", 2, 2, 2, "greedy", "model_sharded", "steps"),
    ("pmap", 1, 4, 1, "exact_match", "ngram", "generate"),
    ("pmap", 1, 8, 4, "exact_match", "model", "generate"),
]
"""Driver, data, model, KV heads, rule, drafter, and how it is called."""


@pytest.fixture(scope="module")
def found():
    return worlds.run("cases", COMBINATIONS, devices=8)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: "-".join(map(str, combination)))
def test_text_is_that_of_one_device(found, combination):
    assert found["texts"][COMBINATIONS.index(combination)]


def test_every_pair_of_settings_meets():
    values = ("shard_map", "jit", "pmap"), (1, 2), (1, 2, 4, 8), (1, 2, 4), ("greedy", "exact_match")
    for first, second in itertools.combinations(range(5), 2):
        wanted = set(itertools.product(values[first], values[second]))
        if (first, second) == (1, 2):
            wanted -= {(2, 8)}
        assert wanted <= {(row[first], row[second]) for row in COMBINATIONS}


def test_case_26_fillers_have_no_effect_on_a_mesh(found):
    """On one device and on two, with whatever stands behind the drafts: one text, and equal counts."""
    first, *others = found["fillers"].values()
    assert len(others) == 9
    assert all(other == first for other in others)
    assert sum(row.count(60) for row in first["tokens"]) > 10
    assert [count > 0 for count in first["drafted"]] == [False, True, True, True]
    assert 0 < sum(first["accepted"]) < sum(first["drafted"])


def test_case_50_the_lowest_id_wins_across_shards(found):
    """Ids 2 and 5 on two devices: plain steps, windows of every size, a draft model's argmax, and top-k of 1."""
    for name, run in found["ties"].items():
        assert run["tokens"] == [[2] * 10] * 4, name
    accepted = [found["ties"][f"scripted {window}"]["accepted"] for window in range(4)]
    assert accepted[0] == [0] * 4
    assert [[count > 0 for count in run] for run in accepted[1:]] == [[True, False, True, True]] * 3
    assert found["ties"]["model"]["accepted"] == found["ties"]["model"]["drafted"]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_case_58_logits_are_those_of_one_device(found, kv_heads, devices):
    assert found["logits"][f"{kv_heads} {devices}"] < 1e-5
    assert found["logits"][f"{kv_heads} spread"] > 0.5


@pytest.mark.parametrize("name", ["biased", "sliding"])
def test_biases_and_sliding_windows_are_those_of_one_device(found, name):
    """Of what is summed over two devices each has its bias once."""
    assert found["logits"][f"{name} 2"] < 1e-5
    assert found["logits"][f"{name} spread"] > 0.5
    assert found["logits"]["sliding matters"] > 0.1


def test_devices_share_the_rows_of_a_batch(found):
    """Three rows on four devices: the drafts, the verdicts and the counts of one device, and its log-probabilities.

    Their parameters differ, and biases, penalties, stop ids and forbidden ids lie in all parts of the vocabulary.
    """
    alone, shared = found["shares"]["SingleDevice"], found["shares"]["ShardMap"]
    np.testing.assert_allclose(shared.pop("log_probs"), alone.pop("log_probs"), atol=1e-4)
    assert shared == alone
    assert 0 < sum(alone["accepted"]) < sum(alone["drafted"])
    assert not {token for row in alone["tokens"] for token in row} & {*range(20, 40)}
    assert {FinishReason.STOP, FinishReason.LENGTH} == {*alone["reasons"]}


def test_case_62_nothing_recompiles_on_a_mesh(found):
    """Lengths in a bucket, limits, temperatures, filters, seeds, stop ids, and a batch with one prompt."""
    first, later = found["recompilations"]
    assert "jit(_generate)" in first["programs"]
    assert later["programs"] == []
    assert later["lengths"][-1][1:] == [0, 0, 0]
