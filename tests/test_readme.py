"""The README's Python runs as printed, and says what is true."""

import re
from pathlib import Path

import jax
import pytest

import specjax

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def example():
    names: dict = {}
    exec(BLOCKS[0], names)
    return names


def test_example_runs(example):
    assert example["output"].length.tolist() == example["plain"].length.tolist()
    assert (example["output"].stats.steps <= example["plain"].stats.steps).all()


def test_a_drafter_of_your_own(example):
    names: dict = {}
    exec(BLOCKS[1], names)
    assert len(BLOCKS[1].strip().splitlines()) <= 32
    config = specjax.DecodeConfig(
        target=example["decoder"].target, drafter=names["LastSuccessor"](num_tokens=3), verifier=specjax.ExactMatch()
    )
    output = specjax.generate(
        example["params"], jax.random.key(1), example["prompt"], example["length"], example["sampling"],
        config=config, max_new_tokens=32,
    )  # fmt: skip
    assert (output.tokens == example["plain"].tokens).all()
    assert output.stats.drafted.sum() > 0
