"""What every test file needs."""

import gc
from pathlib import Path

import jax
import pytest
from small_jobs import quick_programs

MOST_MAPPINGS = 20_000
"""A compiled program holds several mappings of memory. Linux grants a process 65,530: past that XLA crashes."""


LONG = (
    "testing/test_monte_carlo.py",
    "parallel/test_texts.py",
    "testing/test_mutations.py",
    "testing/test_kit.py",
    "testing/test_equality.py",
    "testing/test_properties.py",
    "jobs/test_job_crash.py",
    "planning/test_compiled_for_tpu.py",
)
"""Files that take minutes, longest first: begun last, one would leave the other worker with nothing to do."""


def pytest_collection_modifyitems(items):
    tests = Path(__file__).parent
    order = {tests / name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Drops the programs of earlier files once there are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def quickly():
    """Runs the tests of a file with the library's programs unoptimised."""
    with quick_programs():
        yield
