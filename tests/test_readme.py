"""The README's Python runs as printed, and says what is true. What needs a checkpoint is in test_real_model.py."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from harness import TableModel

import specjax

README = Path(__file__).parent.parent / "README.md"
EXAMPLE, CHECKPOINT, DRAFTER = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def example(quickly):
    """It sets a precision for all of JAX, which the tests after it must not keep."""
    names, before = {}, jax.config.values["jax_default_matmul_precision"]
    exec(EXAMPLE, names)
    yield names
    jax.config.update("jax_default_matmul_precision", before)


def test_example_runs(example):
    assert example["output"].length.tolist() == example["plain"].length.tolist()
    assert (example["output"].stats.steps <= example["plain"].stats.steps).all()


def test_a_drafter_of_your_own(example):
    names: dict = {}
    exec(DRAFTER, names)
    assert len(DRAFTER.strip().splitlines()) <= 32
    drafter = names["LastSuccessor"](vocab_size=61, num_tokens=3)
    config = specjax.DecodeConfig(target=example["decoder"].target, drafter=drafter, verifier=specjax.ExactMatch())
    output = specjax.generate(
        example["params"], jax.random.key(1), example["prompt"], example["length"], example["sampling"],
        config=config, max_new_tokens=32,
    )  # fmt: skip
    assert (output.tokens == example["plain"].tokens).all()
    assert output.stats.drafted.sum() > 0


def test_the_drafter_learns_from_what_it_writes():
    """A target that counts 0, 1, 2 in circles: after one round every draft is right."""
    names: dict = {}
    exec(DRAFTER, names)
    config = specjax.DecodeConfig(
        target=TableModel(vocab_size=3),
        drafter=names["LastSuccessor"](vocab_size=3, num_tokens=3),
        verifier=specjax.Greedy(),
    )
    params = specjax.Params(target=100 * jnp.roll(jnp.eye(3), 1, axis=1))
    prompt, length = specjax.pad_prompts([[1]])
    sampling = specjax.sampling_params(1, max_tokens=60)
    output = specjax.generate(params, jax.random.key(0), prompt, length, sampling, config=config, max_new_tokens=60)
    assert output.tokens[0].tolist() == [2, 0, 1] * 20
    assert (int(output.stats.steps[0]), int(output.stats.accepted[0])) == (18, 42)
