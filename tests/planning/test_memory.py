"""What the compiler says of a program that does not fit."""

import jax
import jax.numpy as jnp
import pytest

from specjax.planning.memory import compile_or_refuse, num_bytes, parse_refusal


@pytest.mark.parametrize(
    ("message", "used", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.\n\nTotal hbm usage >= 21.00G:",
            20.5 * 2**30,
            15.75 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (45.75G) exceeds available HBM (15.75G). HLO module: jit_prefill.",
            45.75 * 2**30,
            15.75 * 2**30,
        ),
        ("Ran out of memory in memory space hbm. Used 512.00M of 256.5K hbm.", 512 * 2**20, 256.5 * 2**10),
    ],
)
def test_refusals(message, used, available):
    refusal = parse_refusal(message)
    assert (refusal.used, refusal.available, refusal.excess) == (used, available, used - available)
    assert refusal.message == message.strip()


def test_temporaries_that_alone_are_too_much_stand_beside_the_arguments():
    """Elsewhere the compiler has counted the arguments itself."""
    alone = "HLO temporaries (20.00G) exceeds available HBM (15.75G)."
    assert parse_refusal(alone, 3 * 2**30).excess == 7.25 * 2**30
    assert parse_refusal("Used 20.00G of 15.75G hbm.", 3 * 2**30).excess == 4.25 * 2**30


class Refused:
    """A lowered program that does not compile."""

    def __init__(self, message):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", "INTERNAL: else"])
def test_what_is_refused_for_another_reason_is_refused_too(message):
    refusal = compile_or_refuse(Refused(message))
    assert (refusal.message, refusal.used, refusal.excess) == (message, None, None)


def test_the_bytes_of_shapes():
    tree = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "b": [jax.ShapeDtypeStruct((5,), jnp.int32)]}
    assert num_bytes(tree) == 12 + 20
