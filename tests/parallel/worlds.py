"""What the programs of these tests share: settings of JAX, one small model family, and a single device's texts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from specjax.testing.compiling import compiler_options

TESTS = Path(__file__).parents[1]


def run(program: str, *arguments: Any, devices: int, timeout: float = 600) -> Any:
    """Runs `tests/parallel/<program>.py` on so many virtual CPU devices and reads the JSON that it prints last."""
    process = start(program, *arguments, devices=devices)
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def start(program: str, *arguments: Any, devices: int) -> subprocess.Popen[str]:
    """The same, without waiting for it. Programs are compiled in a hurry: that is most of what they cost."""
    options = {"xla_force_host_platform_device_count": devices} | (compiler_options(0) or {})
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "parallel")))
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    settings["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    command = [sys.executable, TESTS / "parallel" / f"{program}.py", *map(json.dumps, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdout=pipe, stderr=pipe, text=True)
