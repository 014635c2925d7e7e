"""What the programs of these tests share: settings of JAX, one small model family, and a single device's texts."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.testing.compiling import compiler_options

TESTS = Path(__file__).parents[1]


def run(program: str, *arguments: Any, devices: int, limit_s: float = 600) -> Any:
    """Runs `tests/parallel/<program>.py` on so many virtual CPU devices and reads the JSON that it prints last."""
    (out,) = outputs([start(program, *arguments, devices=devices)], limit_s)
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


def outputs(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[str]:
    """What started programs print, to their ends. They are killed if all of them are silent for so long: a hang."""
    said: queue.SimpleQueue[tuple[int, str, str | None]] = queue.SimpleQueue()
    texts = [{"stdout": "", "stderr": ""} for _ in processes]

    def listen(index: int, name: str) -> None:
        for line in getattr(processes[index], name):
            said.put((index, name, line))
        said.put((index, name, None))

    listeners = [threading.Thread(target=listen, args=(i, name)) for i, text in enumerate(texts) for name in text]
    with contextlib.ExitStack() as ending:
        for process in processes:
            ending.enter_context(process)
            ending.callback(process.kill)
        for listener in listeners:
            listener.start()
        waiting = len(listeners)
        while waiting:
            try:
                index, name, line = said.get(timeout=limit_s)
            except queue.Empty as silence:
                raise AssertionError(f"nothing printed for {limit_s} s, after {texts}") from silence
            texts[index][name] += line or ""
            waiting -= line is None
        codes = [process.wait(limit_s) for process in processes]
    assert codes == [0] * len(processes), texts
    return [text["stdout"] for text in texts]
