"""Two processes of four devices each, over loopback, where a minute of silence is a hang. Case 60.

Each id of the vocabulary but one shares its logit with another, to the bit, on another device.
"""

import json
import socket

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts
import worlds
from checkpoint_writers import huggingface_config, huggingface_tensors, tiny, write_huggingface
from harness import tiny_params

import specjax
from specjax.decode import DecodeConfig
from specjax.io.checkpoint import load_checkpoint
from specjax.io.orbax import save_checkpoint

CONFIG = tiny(vocab_size=61, num_layers=1, max_positions=64)
RUNS = (
    ("huggingface", "shard_map", 2, 4),
    ("huggingface", "shard_map", 1, 8),
    ("orbax", "shard_map", 1, 8),
    ("huggingface", "jit", 2, 4),
    ("huggingface", "jit", 1, 8),
)
"""Files, driver, data, model."""
LIMIT_S = 60
DISTINCT = 31
"""Ids that have a logit of their own, one component of the final hidden state; the others repeat them in turn."""
HEAD = 3 * np.eye(DISTINCT, CONFIG.hidden_size, dtype=np.float32)[np.arange(CONFIG.vocab_size) % DISTINCT]
PARAMS = {**tiny_params(0, CONFIG), "unembed": jnp.asarray(HEAD)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The model in files of two kinds."""
    root = tmp_path_factory.mktemp("processes")
    tensors = huggingface_tensors(jax.tree.map(np.asarray, PARAMS))
    directory = write_huggingface(root / "huggingface", huggingface_config(CONFIG), tensors)
    save_checkpoint(root / "orbax", load_checkpoint(directory, dtype="float32"))
    return {name: root / name for name in ("huggingface", "orbax")}


@pytest.fixture(scope="module")
def peers(directories):
    """What each process printed last, and all it printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    files = {name: str(directory) for name, directory in directories.items()}
    processes = [worlds.start("peer", address, index, files, RUNS, devices=4) for index in range(2)]
    return [(json.loads(out.splitlines()[-1]), out) for out in worlds.outputs(processes, LIMIT_S)]


@pytest.fixture(scope="module")
def alone():
    """What one device writes, with its counters."""
    config = DecodeConfig(
        target=specjax.Transformer(CONFIG), drafter=specjax.NGramDrafter(num_tokens=2), prefill_chunk=8
    )
    inputs = texts.inputs([0.0, 1.0, 0.0, 0.7])
    with jax.default_matmul_precision("highest"):
        return decoding.generate(specjax.Params(target=PARAMS), *inputs, config=config, max_new_tokens=texts.NEW)


def test_texts_are_those_of_one_device_on_every_process(peers, alone):
    for last, _ in peers:
        assert last["devices"] == 8
        for run in last["runs"]:
            np.testing.assert_array_equal(run["texts"], alone.tokens)


def test_case_60_two_processes_agree_on_tied_logits(peers, alone):
    """Every device of both has the same tokens and counts of its rows, up to the cap, which cuts the last drafts."""
    right = {"tokens": alone.tokens, "accepted": alone.stats.accepted, "drafted": alone.stats.drafted}
    for index, (*_, data, _) in enumerate(RUNS):
        for name, rows in right.items():
            parts = [part for last, _ in peers for part in last["runs"][index]["devices"][name]]
            assert len(parts) == 8
            assert {first for first, _ in parts} == {4 // data * group for group in range(data)}
            for first, mine in parts:
                np.testing.assert_array_equal(mine, rows[first : first + 4 // data])
    assert alone.length.tolist() == [texts.NEW, texts.NEW, 4, texts.NEW]
    assert 0 < alone.stats.accepted.sum() < alone.stats.drafted.sum()
    assert alone.tokens[::2].max() < DISTINCT <= alone.tokens.max()


def test_each_process_reads_its_part(peers):
    matrices = sum(leaf.size for leaf in jax.tree.leaves(PARAMS) if leaf.ndim == 2)
    rows_apart, model_apart = ([last["runs"][index]["read"] for last, _ in peers] for index in range(2))
    assert rows_apart == [matrices, matrices]
    assert sum(model_apart) == matrices
    assert max(model_apart) < 0.55 * matrices


def test_process_0_alone_is_heard_and_writes(peers, directories):
    assert ["heard from" in out for _, out in peers] == [True, False]
    assert (directories["huggingface"] / "written").read_text() == "0"
    assert [last["agreed"] for last, _ in peers] == [5, 5]


def test_pmap_is_refused(peers):
    assert all("expected pmap on the devices of one process" in last["refusals"]["pmap"] for last, _ in peers)


def test_every_process_hears_that_prompts_differ(peers):
    message = "expected the same prompts on every process, got others on [1] than on process 0"
    assert [(last["refusals"]["same"], last["refusals"]["different"]) for last, _ in peers] == [("none", message)] * 2
