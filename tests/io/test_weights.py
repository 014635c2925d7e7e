import json
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writers import (
    TINY,
    gguf_metadata,
    gguf_tensors,
    huggingface_config,
    huggingface_tensors,
    random_params,
    tiny,
    write_gguf,
    write_huggingface,
)

from specjax.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from specjax.io.weights import StoredTensor, same_values, to_host

FORMATS = ("safetensors", "gguf", "orbax")


def write_all(directory, config, params, *, kind=gguf.GGMLQuantizationType.F32):
    """The same model in each format: `{format: path}`."""
    directory.mkdir(exist_ok=True)
    safetensors = write_huggingface(directory / "hf", huggingface_config(config), huggingface_tensors(params))
    packed = write_gguf(directory / "model.gguf", gguf_metadata(config), gguf_tensors(params, paired=True), kind=kind)
    placed = jax.tree.map(jnp.asarray, params)
    whole = Checkpoint(config=config, params=placed, eos_ids=(), bos_id=None, source=directory)
    save_checkpoint(directory / "orbax", whole)
    return dict(zip(FORMATS, (safetensors, packed, directory / "orbax"), strict=True))


# ---- One tensor ----


def stored(values, row_order=None, log=None):
    """A tensor that is read from an array, and notes what was read."""

    def read(start, stop):
        if log is not None:
            log.append((start, stop))
        return values[start:stop].copy()

    return StoredTensor(shape=values.shape, read=read, row_order=row_order)


def test_matrices_are_read_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("specjax.io.weights._BLOCK_ELEMENTS", 12)
    values, log = np.arange(35, dtype=np.float32).reshape(7, 5), []
    np.testing.assert_array_equal(to_host(stored(values, log=log), np.dtype(np.float32)), values)
    assert log == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_rows_longer_than_a_block_are_read_one_by_one(monkeypatch):
    monkeypatch.setattr("specjax.io.weights._BLOCK_ELEMENTS", 3)
    values, log = np.arange(10, dtype=np.float32).reshape(2, 5), []
    np.testing.assert_array_equal(to_host(stored(values, log=log), np.dtype(np.float32)), values)
    assert log == [(0, 1), (1, 2)]


def test_rows_go_to_their_places_whatever_the_blocks(monkeypatch):
    monkeypatch.setattr("specjax.io.weights._BLOCK_ELEMENTS", 8)
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    out = to_host(stored(values, row_order=np.array([3, 0, 5, 1, 4, 2])), np.dtype(np.float32))
    np.testing.assert_array_equal(out, values[[1, 3, 5, 0, 4, 2]])


def test_conversion_rounds_to_nearest():
    values = np.array([1.0, 1.00390625, 1.01171875, 1.0078126], np.float32)
    out = to_host(stored(values), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(out.astype(np.float32), [1.0, 1.0, 1.015625, 1.0078125])


def test_same_values_looks_at_every_block(monkeypatch):
    monkeypatch.setattr("specjax.io.weights._BLOCK_ELEMENTS", 4)
    values = np.zeros((5, 2), np.float32)
    other = values.copy()
    other[4, 1] = 1
    assert same_values(stored(values), stored(values.copy()))
    assert not same_values(stored(values), stored(other))
    assert not same_values(stored(values), stored(values[:4]))


# ---- Whole models ----

SHARDED_LOAD = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from specjax.io.checkpoint import load_checkpoint, load_config
from specjax.models.params import param_shapes

mesh = jax.make_mesh((4,), ("model",))
rows, replicated = NamedSharding(mesh, PartitionSpec("model")), NamedSharding(mesh, PartitionSpec())

def is_shape(node):
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)

def same(first, *others):
    return all(np.array_equal(np.asarray(first), np.asarray(other)) for other in others)

results = {}
for form, path in json.loads(sys.argv[1]).items():
    plain = load_checkpoint(path, dtype="float32").params
    shapes = param_shapes(load_config(path))
    tree = jax.tree.map(lambda shape: rows if len(shape) == 2 else replicated, shapes, is_leaf=is_shape)
    by_tree = load_checkpoint(path, dtype="float32", sharding=tree).params
    by_one = load_checkpoint(path, dtype="float32", sharding=replicated).params
    results[form] = {
        "default": jax.tree.all(jax.tree.map(lambda x: x.devices() == {jax.devices()[0]}, plain)),
        "tree": jax.tree.all(jax.tree.map(lambda x, where: x.sharding == where, by_tree, tree)),
        "one": jax.tree.all(jax.tree.map(lambda x: x.sharding == replicated, by_one)),
        "values": jax.tree.all(jax.tree.map(same, plain, by_tree, by_one)),
        "shard": by_tree["embed"].addressable_shards[1].data.shape == (24, 32),
    }
print(json.dumps(results))
"""


def run(program, *arguments):
    """Runs a program in a process of its own and reads the JSON that it prints last."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_params_are_placed_on_the_shardings_asked_for(tmp_path):
    paths = write_all(tmp_path, TINY, random_params(TINY))
    results = run(SHARDED_LOAD, json.dumps({form: str(path) for form, path in paths.items()}))
    assert results == {form: dict.fromkeys(("default", "tree", "one", "values", "shard"), True) for form in FORMATS}


def test_shardings_of_another_structure_are_refused(tmp_path):
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for path in write_all(tmp_path, TINY, random_params(TINY)).values():
        with pytest.raises(ValueError, match=r"Dict key mismatch|[Ee]xpected"):
            load_checkpoint(path, dtype="float32", sharding={"embed": default})


# ---- Memory ----

WIDE = tiny(vocab_size=25_000, hidden_size=512, intermediate_size=512, num_heads=64, num_kv_heads=64)
"""The last tensor loaded (the head, 49 MiB in float32) is as large as any, so that the peak is the end."""

MEASURED_LOAD = """
import json, sys
import jax
import jax.numpy as jnp
from specjax.io.checkpoint import load_checkpoint, load_config

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

load_checkpoint(sys.argv[2], dtype="float32")  # what the libraries take once
before = peak()
params = load_checkpoint(sys.argv[1], dtype="float32").params
model = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"above": peak() - before - model, "largest": params["unembed"].nbytes}))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    params = random_params(WIDE)
    paths = write_all(directory / "wide", WIDE, params, kind=gguf.GGMLQuantizationType.Q8_0)
    return paths, write_all(directory / "small", TINY, random_params(TINY))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
@pytest.mark.parametrize("form", FORMATS)
def test_the_host_never_holds_more_than_the_largest_tensor_above_the_model(wide, form):
    paths, small = wide
    measured = run(MEASURED_LOAD, str(paths[form]), str(small[form]))
    print(form, measured)
    assert measured["above"] < 1.15 * measured["largest"] + (8 << 20)
