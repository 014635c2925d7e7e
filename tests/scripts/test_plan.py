"""scripts/plan.py from its command line, with libtpu and without."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import pytest
from checkpoint_writers import huggingface_config, tiny

from specjax.planning import figures, plan
from specjax.planning.memory import Refusal

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


@pytest.fixture
def small(tmp_path):
    """The path of a small architecture, and a command line for it."""
    config = huggingface_config(tiny(vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=1))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return ["--target", str(path), "--draft", str(path), "--topology", "v5e:2x4", "--context", "40"]


def test_a_plan_is_written_as_tables_json_and_a_picture(main, small, tmp_path, capsys):
    pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed (extra tpu-plan)")
    output, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    options = [
        "--max-new-tokens",
        "8",
        "--batch",
        "2",
        "--dtype",
        "float32",
        "--output",
        str(output),
        "--plot",
        str(plot),
    ]
    assert main([*small, *options]) == 0
    shown, written = capsys.readouterr().out, json.loads(output.read_text())
    (batch,) = written["batches"]
    assert batch["programs"].keys() == {"prefill", "plain", "speculative"}
    assert all(program["fits"] and program["host_transfers"] == 0 for program in batch["programs"].values())
    assert f"{batch['modelled']['speedup']['0.9']:.2f} (" in shown
    assert written["note"] in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_programs_are_those_that_generate_runs(main, small, monkeypatch, dtype):
    """Without their compiler: lowered for a CPU, and looked at where they would be compiled."""
    texts = []

    def compile_or_refuse(lowered, argument_bytes):
        texts.append(lowered.as_text())
        return Refusal(message="not compiled")

    monkeypatch.setattr(plan, "describe", lambda name: jax.devices())
    monkeypatch.setattr(plan, "version", lambda name: "none")
    monkeypatch.setattr(figures, "compile_or_refuse", compile_or_refuse)
    assert main([*small, "--max-new-tokens", "8", "--batch", "1", "--mesh", "model=1", "--dtype", dtype]) == 0
    assert len(texts) == 3
    for text in texts:
        products = re.findall(r"stablehlo.dot_general .*", text)
        assert products
        assert all(("HIGHEST" in product) == (dtype == "float32") for product in products)


def test_finished_batches_are_on_disk_when_a_later_one_fails(main, small, tmp_path, monkeypatch, capsys):
    output = tmp_path / "plan.json"

    def plan_batch(request, batch, mesh, say):
        if batch == 2:
            assert json.loads(output.read_text())["batches"] == [{"batch_size": 1}]
            raise ValueError("broken")
        return {"batch_size": batch}

    monkeypatch.setattr(plan, "describe", lambda name: jax.devices())
    monkeypatch.setattr(plan, "version", lambda name: "none")
    monkeypatch.setattr(plan, "_plan_batch", plan_batch)
    assert main([*small, "--max-new-tokens", "8", "--batch", "1,2", "--mesh", "model=1", "--output", str(output)]) == 1
    assert capsys.readouterr().err == "error: broken\n"
    assert json.loads(output.read_text())["batches"] == [{"batch_size": 1}]


def test_what_is_refused(main, capsys):
    assert main([*GIVEN, "--batch", "0"]) == 2
    assert "expected batch sizes" in capsys.readouterr().err
