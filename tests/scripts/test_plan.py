"""scripts/plan.py from its command line, where libtpu is not."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"
GIVEN = ["--target", "smollm2-135m", "--draft", "smollm2-135m", "--topology", "v5e:2x4"]


@pytest.fixture
def main():
    spec = importlib.util.spec_from_file_location("plan_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_without_the_compiler_it_says_what_to_install(main, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(GIVEN) == 1
    assert capsys.readouterr().err == (
        "error: expected libtpu, the compiler for TPUs, got none: pip install -e '.[tpu-plan]'\n"
    )


def test_what_is_refused(main, capsys):
    assert main([*GIVEN, "--batch", "0"]) == 2
    assert "expected batch sizes" in capsys.readouterr().err
