"""Every driver writes a single device's text: each pair of settings meets here; `texts.py` alone runs all of them."""

import itertools

import pytest
import worlds

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
    ("pmap", 2, 2, 2, "greedy", "model_sharded", "generate"),
    ("pmap", 1, 4, 1, "exact_match", "ngram", "generate"),
    ("pmap", 1, 8, 4, "exact_match", "model", "generate"),
]
"""Driver, data, model, KV heads, rule, drafter, and how it is called."""


@pytest.fixture(scope="module")
def results():
    return dict(zip(COMBINATIONS, worlds.run("texts", COMBINATIONS, devices=8), strict=True))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: "-".join(map(str, combination)))
def test_text_is_that_of_one_device(results, combination):
    assert results[combination]


def test_every_pair_of_settings_meets():
    values = ("shard_map", "jit", "pmap"), (1, 2), (1, 2, 4, 8), (1, 2, 4), ("greedy", "exact_match")
    for first, second in itertools.combinations(range(5), 2):
        wanted = set(itertools.product(values[first], values[second]))
        if (first, second) == (1, 2):
            wanted -= {(2, 8)}
        assert wanted <= {(row[first], row[second]) for row in COMBINATIONS}
