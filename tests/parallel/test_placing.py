import numpy as np
import pytest
import worlds
from checkpoint_writers import (
    gguf_metadata,
    gguf_tensors,
    huggingface_config,
    huggingface_tensors,
    random_params,
    tiny,
    write_gguf,
    write_huggingface,
)
from harness import TableModel, tiny_config

from specjax.decode import DecodeConfig
from specjax.io.checkpoint import convert_checkpoint
from specjax.io.weights import StoredTensor, to_host
from specjax.parallel.layout import cuts, sources
from specjax.parallel.specs import on_mesh

BIASED = tiny(
    vocab_size=61,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    intermediate_size=50,
    attention_bias=True,
    attention_output_bias=True,
)
"""Nothing in it divides by 4; every kind of bias that these formats have."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("placing")
    params = random_params(BIASED)
    paths = {
        "safetensors": write_huggingface(directory / "hf", huggingface_config(BIASED), huggingface_tensors(params)),
        "gguf": write_gguf(directory / "a.gguf", gguf_metadata(BIASED), gguf_tensors(params, paired=True)),
        "orbax": directory / "orbax",
    }
    convert_checkpoint(paths["safetensors"], paths["orbax"], dtype="float32")
    return worlds.run("placing", {form: str(path) for form, path in paths.items()}, devices=8)


def test_a_load_onto_a_mesh_is_a_load_and_a_placement(found):
    whole = {"same": True, "shard": [16, 48]}
    assert found["loads"] == {"safetensors": whole, "gguf": whole, "orbax": whole}


def test_pmap_stacks_params_without_a_second_copy(found):
    """Those on the mesh go on in their own buffers, also where two models share them; whole ones stay as they are."""
    kept = ("same buffers", "taken", "values", "whole stays", "fresh", "shared")
    assert found["stacks"] == dict.fromkeys(kept, True)


@pytest.mark.parametrize("driver", ["shard_map", "jit", "pmap"])
@pytest.mark.parametrize("call", ["steps", "insert"])
def test_drivers_go_on_in_the_buffers_that_they_are_given(found, driver, call):
    assert found["donations"][driver][call]


def test_a_layer_has_two_reductions(found):
    assert found["collectives"] == [{"all-reduce": 3}, {"all-reduce": 7}]


@pytest.mark.parametrize("driver", ["shard_map", "jit", "pmap"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("batch", "expected a batch that is a multiple of data=2, got 3 rows"),
        ("mesh", "expected a mesh of 1 to 8 devices, got data=3 and model=3"),
        ("axis", "expected a model over an axis of the mesh {'data': 2, 'model': 4}, got 'other'"),
        ("joined", "expected params laid out like param_shapes"),
        ("moved", "expected whole params, [61, 32], got [64, 32] (of another mesh?)"),
        ("uncut", "over the mesh's 'model' axis of 4 devices, got whole ones: pass on_mesh(config)"),
        ("uncut call", "over the mesh's 'model' axis of 4 devices, got whole ones: pass on_mesh(config)"),
        ("argument", "expected prompt_length in 0..4, got [13, 13, 13]"),
    ],
)
def test_what_cannot_be_done_is_refused(found, driver, what, says):
    assert says in found["refusals"][f"{what} {driver}"]


# ---- Layout ----


def test_heads_are_padded_in_their_groups_and_repeated_beside_their_copies():
    table = sources(tiny_config(num_heads=6, num_kv_heads=2, head_dim=2, vocab_size=61, intermediate_size=48), 4)
    assert table["query"].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, 6, 7, 8, 9, 10, 11, -1, -1]
    assert table["value"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert table["vocab"].tolist() == [*range(61), -1, -1, -1]
    assert table["inner"] is None


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4), (6, 2), (9, 3), (32, 8)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 16])
def test_each_device_has_the_kv_heads_of_its_query_heads(heads, parts):
    query_heads, kv_heads = heads
    config = tiny_config(num_heads=query_heads, num_kv_heads=kv_heads, head_dim=2)
    table = sources(config, parts)
    query = np.arange(query_heads) if table["query"] is None else table["query"][::2] // 2
    value = np.arange(kv_heads) if table["value"] is None else table["value"][::2] // 2
    assert sorted(query[query >= 0]) == list(range(query_heads))
    served = np.repeat(value, len(query) // len(value))
    assert all(head // (query_heads // kv_heads) == kv for head, kv in zip(query, served, strict=True) if head >= 0)
    assert not len(query) % parts
    assert not len(value) % parts


def test_every_param_has_its_cut():
    named = {name: cuts(name, 2) for name in ("embed", "unembed", "q", "k", "v", "o", "gate", "up", "down")}
    assert named == {
        "embed": ("vocab", None),
        "unembed": ("vocab", None),
        "q": ("query", None),
        "k": ("value", None),
        "v": ("value", None),
        "o": (None, "query"),
        "gate": ("inner", None),
        "up": ("inner", None),
        "down": (None, "inner"),
    }
    biases = {name: cuts(f"{name}_bias", 1) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert biases == {name: named[name][:1] for name in biases}
    assert cuts("attention_norm", 1) == cuts("norm", 1) == (None,)


def test_models_of_other_kinds_stay_whole():
    config = DecodeConfig(target=TableModel(vocab_size=4))
    assert on_mesh(config, target=None) == config
    with pytest.raises(ValueError, match="expected a Transformer to cut over the axis 'model', got TableModel"):
        on_mesh(config)


# ---- Reading parts ----


def test_only_wanted_rows_and_columns_are_read():
    values, log = np.arange(48.0, dtype=np.float32).reshape(8, 6), []

    def read_block(rows, columns):
        log.append((rows.start, rows.stop, columns.start, columns.stop))
        return values[rows, columns].copy()

    tensor = StoredTensor(shape=values.shape, read=None, read_block=read_block)
    out = to_host(tensor, np.dtype(np.float32), [np.array([5, 3, -1, 5]), np.array([-1, 2, 3])])
    np.testing.assert_array_equal(out, [[0, 32, 33], [0, 20, 21], [0, 0, 0], [0, 32, 33]])
    assert log == [(3, 6, 2, 4)]


def test_rows_in_another_order_on_disk_are_found():
    values = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    tensor = StoredTensor(shape=(4, 2), read=lambda start, stop: values[start:stop], row_order=np.array([2, 0, 3, 1]))
    out = to_host(tensor, np.dtype(np.float32), [np.array([0, 3, -1]), np.arange(2)])
    np.testing.assert_array_equal(out, [values[1], values[2], [0, 0]])
