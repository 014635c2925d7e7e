"""Program: scripts/generate.py, alone or as one of two processes, which then differ in their settings and models."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
from pathlib import Path

import jax

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"


class Heard(io.StringIO):
    """Keeps what is written and passes it on, as a sign of life."""

    def write(self, text):
        sys.__stderr__.write(text)
        return super().write(text)


def load_script():
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(script, settings):
    """What the script says of settings that the other process may not have; "loading" if it goes on to the models."""
    try:
        script.complete_prompts(settings, [])
    except ValueError as error:
        return str(error)
    return "none"


def load(*arguments):
    raise ValueError("loading")


def main():
    together, (model, other), prompts, output = map(json.loads, sys.argv[1:])
    options = ["--model", model, "--drafter", "ngram", "--no-compilation-cache"]
    options += ["--verifier", "exact_match", "--temperature", "0.8", "--num-speculative-tokens", "3"]
    options += ["--prompts", prompts, "--output", output, "--max-new-tokens", "12", "--batch-size", "2"]
    if together is None:
        options += ["--pace", "always"]
    else:  # the pace is measured, which both must agree on
        address, process = together
        options += ["--compare", "--mesh", "data=2,model=2", "--coordinator-address", address]
        options += ["--num-processes", "2", "--process-id", str(process)]
    jax.config.update("jax_log_compiles", True)  # a sign of life too
    script, said = load_script(), Heard()
    with contextlib.redirect_stderr(said):
        status = script.main(options)
    found = {"status": status, "said": said.getvalue(), "refusals": {}}
    if together is not None and not status:
        script.build_decoder = load
        settings = script.parse_options(options, description=None)
        mine = {"dtype": {"dtype": "bfloat16"}, "batch": {"batch_size": 4}, "model": {"model": other}}
        mine |= {"file": {"output": f"{output}.{process}"}}
        for name, changes in mine.items():
            differing = dataclasses.replace(settings, **(changes if process else {}))
            found["refusals"][name] = refusal(script, differing)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
