"""What tests of scripts share: a script as a module, and settings of JAX that end with each test."""

import importlib.util
from pathlib import Path

import jax
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch, quickly):
    """What a script sets in JAX ends with the test, and its cache lies apart."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


@pytest.fixture
def script(request):
    """The script that a test file is named after, as a module of its own."""
    name = request.path.stem.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
