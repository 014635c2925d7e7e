"""Several processes: start-up, and what they have to agree on. One program runs everywhere, on the same arguments."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"
"""Coordinator address that means: let JAX find the other processes (TPU pods, GKE, Slurm, Open MPI)."""


def start(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a run; with no arguments there is one. To be called before JAX sees a device.

    Args:
      coordinator_address: `host:port` of process 0, the same everywhere, or "auto".
      num_processes: how many there are; not with "auto".
      process_id: which one this is, from 0; not with "auto".

    Raises:
      ValueError: some of the arguments without the others, or a pod of which this process knows nothing.
    """
    check_launch(coordinator_address, num_processes, process_id)
    if coordinator_address == AUTO:
        jax.distributed.initialize()
    elif coordinator_address is not None:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ValueError(f"expected --coordinator-address auto on {jax.process_count()} hosts, got none")


def check_launch(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Refuses arguments of `start` that do not go together.

    Raises:
      ValueError: says which.
    """
    given = [value is not None for value in (coordinator_address, num_processes, process_id)]
    if coordinator_address == AUTO:
        if any(given[1:]):
            raise ValueError("expected --coordinator-address auto without --num-processes and --process-id, got both")
        return
    if any(given) and not all(given):
        raise ValueError("expected --coordinator-address, --num-processes and --process-id together, got some of them")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"expected --process-id in 0..{num_processes - 1}, got {process_id}")


@contextlib.contextmanager
def first_process_only() -> Iterator[None]:
    """Inside, only process 0 is heard on stdout and stderr."""
    if jax.process_index() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def only_on_first(path: str) -> str:
    """The path of a file that process 0 writes; the others write nowhere."""
    return path if jax.process_index() == 0 else os.devnull


def agreed(values: Any) -> Any:
    """Process 0's values (a pytree of numbers of equal shapes), on every process: what steers a run must be equal."""
    return multihost_utils.broadcast_one_to_all(values) if jax.process_count() > 1 else values


def check_same(what: str, value: Any) -> None:
    """Makes sure that all processes have the same value: otherwise they would wait for each other, or write nonsense.

    Args:
      what: its name, for the message.
      value: anything whose `repr` says all of it.

    Raises:
      ValueError: on every process, and which of them differ from process 0.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(repr(value).encode()).digest(), np.uint32)
    first, *others = multihost_utils.process_allgather(digest)
    different = [index for index, other in enumerate(others, 1) if (other != first).any()]
    if different:
        raise ValueError(f"expected the same {what} on every process, got others on {different} than on process 0")
