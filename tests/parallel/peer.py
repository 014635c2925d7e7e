"""Program: one of two processes that load a model and decode together, rows apart and then parts of the model apart."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from texts import NEW, inputs

import specjax
from specjax.decode import DecodeConfig
from specjax.io import huggingface
from specjax.io.checkpoint import load_checkpoint, load_config
from specjax.jobs.placement import MESH_DRIVERS
from specjax.parallel.launch import agreed, check_same, first_process_only, only_on_first, start
from specjax.parallel.mesh import make_mesh
from specjax.parallel.pmapped import PMap
from specjax.parallel.specs import on_mesh, param_cuts


def count_reads(log):
    """Notes how many elements of matrices are read from files."""
    rows, block = huggingface._read_rows, huggingface._read_block

    def read(original, *arguments):
        values = original(*arguments)
        log.append(values.size if values.ndim > 1 else 0)
        return values

    huggingface._read_rows = lambda *arguments: read(rows, *arguments)
    huggingface._read_block = lambda *arguments: read(block, *arguments)


def texts(directories, source, driver, data, model, log):
    directory = directories[source]
    driver, target = MESH_DRIVERS[driver](make_mesh(data, model)), specjax.Transformer(load_config(directory))
    config = DecodeConfig(target=target, drafter=specjax.NGramDrafter(num_tokens=2), prefill_chunk=8)
    config = on_mesh(config)
    log.clear()
    checkpoint = load_checkpoint(directory, dtype="float32", sharding=param_cuts(config.target, driver.mesh))
    params = driver.place(specjax.Params(target=checkpoint.params), config)
    arguments = inputs([0.0, 1.0, 0.0, 0.7])
    output = driver.generate(params, *arguments, config=config, max_new_tokens=NEW)
    found = {"tokens": output.tokens, "accepted": output.stats.accepted, "drafted": output.stats.drafted}
    print("decoded on a mesh of", data, "x", model, flush=True)
    here = {name: [part(shard) for shard in rows.addressable_shards] for name, rows in found.items()}
    return {"texts": driver.to_host(output.tokens).tolist(), "read": sum(log), "devices": here}


def part(shard):
    """The first row that a device has, and its rows."""
    return [shard.index[0].start or 0, shard.data.tolist()]


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


def main():
    address, process, directories, runs = map(json.loads, sys.argv[1:])
    log = []
    count_reads(log)
    start(address, 2, process)
    print("joined", flush=True)
    found = [texts(directories, *run, log) for run in runs]
    with first_process_only():
        print("heard from", process)
    Path(only_on_first(f"{directories['huggingface']}/written")).write_text(str(process))
    same = int(agreed(np.int32(process + 5)))
    calls = {
        "pmap": lambda: PMap(make_mesh(2, 4)),
        "same": lambda: check_same("prompts", ["a", 1]),
        "different": lambda: check_same("prompts", ["a", process]),
    }
    refusals = {name: refusal(call) for name, call in calls.items()}
    print(json.dumps({"runs": found, "refusals": refusals, "agreed": same, "devices": jax.device_count()}))


if __name__ == "__main__":
    main()
