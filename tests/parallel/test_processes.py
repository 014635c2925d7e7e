"""Two processes of four devices each, over loopback, within a minute."""

import json
import socket

import decoding
import jax
import numpy as np
import pytest
import texts
import worlds
from checkpoint_writers import huggingface_config, huggingface_tensors, tiny, write_huggingface
from harness import tiny_params

import specjax
from specjax.decode import DecodeConfig

CONFIG = tiny(vocab_size=61, num_layers=1, max_positions=64)
MESHES = ((2, 4), (1, 8))
PARAMS = tiny_params(0, CONFIG)
LIMIT_S = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processes") / "model"
    return write_huggingface(
        directory, huggingface_config(CONFIG), huggingface_tensors(jax.tree.map(np.asarray, PARAMS))
    )


@pytest.fixture(scope="module")
def peers(directory):
    """What each process printed last, and all it printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [worlds.start("peer", address, index, str(directory), MESHES, devices=4) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [(json.loads(out.splitlines()[-1]), out) for out, _ in outputs]


def test_texts_are_those_of_one_device_on_every_process(peers):
    config = DecodeConfig(target=specjax.Transformer(CONFIG), prefill_chunk=8)
    params = specjax.Params(target=PARAMS)
    inputs = texts.inputs([0.0, 1.0, 0.0, 0.7])
    with jax.default_matmul_precision("highest"):
        wanted = decoding.autoregressive(params, *inputs, config=config, max_new_tokens=texts.NEW).tokens
    for last, _ in peers:
        assert last["devices"] == 8
        for run in last["runs"]:
            np.testing.assert_array_equal(run["texts"], wanted)


def test_each_process_reads_its_part(peers):
    matrices = sum(leaf.size for leaf in jax.tree.leaves(PARAMS) if leaf.ndim == 2)
    rows_apart, model_apart = ([last["runs"][mesh]["read"] for last, _ in peers] for mesh in range(2))
    assert rows_apart == [matrices, matrices]
    assert sum(model_apart) == matrices
    assert max(model_apart) < 0.55 * matrices


def test_process_0_alone_is_heard_and_writes(peers, directory):
    assert ["heard from" in out for _, out in peers] == [True, False]
    assert (directory / "written").read_text() == "0"
    assert [last["agreed"] for last, _ in peers] == [5, 5]


def test_pmap_is_refused(peers):
    assert all("expected pmap on the devices of one process" in last["refusal"] for last, _ in peers)
