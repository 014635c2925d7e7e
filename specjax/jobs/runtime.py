"""What scripts share: settings of JAX before anything runs, an output file, one line for an error, peak memory."""

import contextlib
import gc
import os
import resource
import sys
from pathlib import Path
from typing import TextIO

import jax
from jax.experimental.compilation_cache import compilation_cache

from specjax.io.sources import cache_directory
from specjax.parallel.launch import only_on_first


def matmul_precision(dtype: str) -> str | None:
    """How exactly matrices are multiplied where this is the dtype of the weights; None: as JAX does by default."""
    return "highest" if dtype == "float32" else None


def configure(dtype: str, *, cache: bool) -> None:
    """Sets matrix multiplication to full float32 where that is the dtype, and keeps compiled programs on disk.

    Args:
      dtype: of the weights.
      cache: whether to keep programs, however small: in $JAX_COMPILATION_CACHE_DIR, or else where fetched models are.
    """
    gc.set_threshold(100_000)  # at 700, looking for cycles takes a fifth of a start with many rows
    jax.config.update("jax_default_matmul_precision", matmul_precision(dtype))
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_directory() / "compiled")
    jax.config.update("jax_compilation_cache_dir", directory if cache else None)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # JAX looks at these once, at its first compilation


def fail(error: Exception, status: int) -> int:
    """Says what went wrong, on one line of stderr; returns the exit status."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def open_output(path: str | None) -> contextlib.AbstractContextManager[TextIO | None]:
    """A script's output file, None without a path; of several processes the first one's alone."""
    return contextlib.nullcontext() if path is None else Path(only_on_first(path)).open("w", encoding="utf-8")


def peak_memory() -> dict[str, int | None]:
    """Bytes this process has held at most: on the host, and on its first device where that keeps count.

    Everything counts, compiling and loading too: it is what the machine has to have.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }
