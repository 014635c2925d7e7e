"""What the compiler says of a program that does not fit."""

import pytest

from specjax.planning.memory import parse_refusal


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


def test_other_messages_are_not_taken_for_one():
    with pytest.raises(ValueError, match="expected a message about HBM, got: INTERNAL"):
        parse_refusal("INTERNAL: something else")
