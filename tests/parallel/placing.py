"""Program: what lies where on 8 devices, and what they exchange."""

import dataclasses
import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from harness import tiny_config, tiny_params
from jax.sharding import PartitionSpec as P

import specjax
from specjax.decode import DecodeConfig
from specjax.io.checkpoint import load_checkpoint, load_config
from specjax.jobs.placement import MESH_DRIVERS
from specjax.models.params import join_projections
from specjax.models.transformer import Transformer
from specjax.parallel.mesh import MODEL, make_mesh
from specjax.parallel.pmapped import PMap
from specjax.parallel.specs import param_cuts, shard_params, state_specs
from specjax.slots import Slots


def same(first, second):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool(np.array_equal(x, y)) and x.sharding == y.sharding, first, second)
    )


def loads(paths):
    """Whether each format, loaded onto the mesh, is what was loaded whole and then placed from the host."""
    mesh, found = make_mesh(2, 4), {}
    for form, path in paths.items():
        target = Transformer(load_config(path), axis=MODEL)
        loaded = load_checkpoint(path, dtype="float32", sharding=param_cuts(target, mesh)).params
        whole = specjax.Params(target=jax.tree.map(np.asarray, load_checkpoint(path, dtype="float32").params))
        placed = shard_params(whole, DecodeConfig(target=target), mesh).target
        shard = loaded["embed"].addressable_shards[0].data.shape
        found[form] = {"same": same(loaded, placed), "shard": list(shard)}
    return found


def stacks():
    """What `PMap.place` does with memory: of params on the mesh, of whole ones, and of one model in both places."""
    mesh, target = make_mesh(2, 4), Transformer(tiny_config(), axis=MODEL)
    config, whole = DecodeConfig(target=target), specjax.Params(target=tiny_params())

    def loaded():
        return shard_params(jax.tree.map(jnp.copy, whole), config, mesh)

    sharded = loaded()
    before, values = pointers(sharded), jax.tree.leaves(jax.tree.map(partial(on_devices, mesh=mesh), sharded))
    stacked = PMap(mesh).place(sharded, config)
    parts = [np.array(leaf) for leaf in jax.tree.leaves(stacked)]
    fresh = PMap(mesh).place(whole, config)
    drafter = specjax.ModelDrafter(model=target, num_tokens=2, vocab_size=61, axis=MODEL)
    both = specjax.Params(target=(once := loaded().target), draft=once)
    both = PMap(mesh).place(both, dataclasses.replace(config, drafter=drafter))
    return {
        "same buffers": pointers(stacked) == before,
        "taken": all(leaf.is_deleted() for leaf in jax.tree.leaves(sharded)),
        "values": all(map(np.array_equal, parts, values)),
        "whole stays": not any(leaf.is_deleted() for leaf in jax.tree.leaves(whole)),
        "fresh": all(map(np.array_equal, jax.tree.leaves(fresh), parts)),
        "shared": pointers(both.target) == pointers(both.draft),
    }


def on_devices(leaf, mesh):
    """A copy of what each device has of an array."""
    shards = {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
    return np.stack([shards[device] for device in mesh.devices.flat])


def pointers(params):
    """Where each device's part of each array lies."""
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(params)]
    return [sorted((shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in parts) for parts in shards]


def collectives(num_layers):
    """Kinds of exchange in one compiled call of the model over 4 devices."""
    config = tiny_config(num_layers=num_layers)
    target, mesh = Transformer(config, axis=MODEL), make_mesh(1, 4)
    decoder = DecodeConfig(target=target)
    params = shard_params(specjax.Params(target=tiny_params(0, config)), decoder, mesh).target
    cache = state_specs(decoder).cache
    specs = jax.tree.map(lambda cut: cut.sharding.spec, param_cuts(target, mesh))
    make = partial(target.init_cache, batch_size=2, capacity=16)
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
    empty = mapped(make, in_specs=(specs,), out_specs=cache)(params)
    apply = mapped(target.apply, in_specs=(specs, P(), P(), cache), out_specs=(P(), cache))
    tokens = jnp.ones((2, 3), jnp.int32)
    text = jax.jit(apply).lower(params, tokens, jnp.zeros((2, 3), jnp.int32), empty).compile().as_text()
    kinds = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def donations():
    """Whether steps and insertions of each driver write the caches where they are, and take the old state over."""
    target = Transformer(tiny_config(num_layers=1), axis=MODEL)
    config, prompt = DecodeConfig(target=target, prefill_chunk=8), jnp.ones((1, 4), jnp.int32)
    arguments = jax.random.key(0), prompt, jnp.full(1, 4), specjax.sampling_params(1, max_tokens=3)
    whole, found = specjax.Params(target=tiny_params(0, target.config)), {}
    for name, kind in MESH_DRIVERS.items():
        driver = kind(make_mesh(1, 2))
        params = driver.place(whole, config)
        state = driver.prefill(params, *arguments, config=config, max_new_tokens=3)
        sampling, before = driver.to_devices(arguments[-1]), pointers(state.cache)
        after = driver.decode_steps(params, state, sampling, 1, config=config)
        taken = all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))
        found[name] = {"steps": pointers(after.cache) == before and taken}
        row = Slots(state=after, sampling=sampling)
        slots = driver.empty_slots(row, 2, config=config)
        before = pointers(slots.state.cache)
        inserted = driver.insert(slots, row, 0, config=config)
        taken = all(leaf.is_deleted() for leaf in jax.tree.leaves(slots.state.cache))
        found[name]["insert"] = pointers(inserted.state.cache) == before and taken
    return found


def refusals():
    """What each of these calls says."""
    target = Transformer(tiny_config(), axis=MODEL)
    config, params = DecodeConfig(target=target), specjax.Params(target=tiny_params())
    prompt, length = jnp.ones((3, 4), jnp.int32), jnp.full(3, 4)
    sampling = specjax.sampling_params(3, max_tokens=2)
    sampling_of_two = specjax.sampling_params(2, max_tokens=2)
    start = {"config": config, "max_new_tokens": 2}
    whole = DecodeConfig(target=Transformer(tiny_config()))
    half = shard_params(params, config, make_mesh(1, 8))
    calls = {
        "batch": lambda driver: driver.generate(params, jax.random.key(0), prompt, length, sampling, **start),
        "mesh": lambda driver: make_mesh(3, 3),
        "axis": lambda driver: driver.place(params, DecodeConfig(target=Transformer(tiny_config(), axis="other"))),
        "joined": lambda driver: driver.place(specjax.Params(target=join_projections(tiny_params())), config),
        "moved": lambda driver: driver.place(half, config),
        "uncut": lambda driver: driver.place(params, whole),
        "uncut call": lambda driver: driver.generate(
            params, jax.random.key(0), prompt[:2], length[:2], sampling_of_two, config=whole, max_new_tokens=2
        ),
        "argument": lambda driver: driver.generate(params, jax.random.key(0), prompt, length + 9, sampling, **start),
    }
    drivers = {name: driver(make_mesh(2, 4)) for name, driver in MESH_DRIVERS.items()}
    return {f"{name} {kind}": message(call, driver) for name, call in calls.items() for kind, driver in drivers.items()}


def message(call, driver):
    try:
        call(driver)
    except ValueError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    paths = json.loads(sys.argv[1])
    exchanged = [collectives(num_layers) for num_layers in (1, 3)]
    print(
        json.dumps(
            {
                "loads": loads(paths),
                "collectives": exchanged,
                "refusals": refusals(),
                "stacks": stacks(),
                "donations": donations(),
            }
        )
    )
