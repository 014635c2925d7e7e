"""Drivers: the functions of `specjax.compiled` on a mesh."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import decode
from specjax.compiled import check_arguments
from specjax.decode import DecodeConfig
from specjax.parallel.specs import ROWS, pace_specs, param_specs, place, shard_params
from specjax.types import Output, Pace, Params, SamplingParams


@dataclasses.dataclass(frozen=True)
class ShardMap:
    mesh: Mesh

    def place(self, params: Params, config: DecodeConfig) -> Params:
        return shard_params(params, config, self.mesh)

    def generate(self, params, key, prompt, prompt_length, sampling, pace=None, *, config, max_new_tokens) -> Output:
        check_arguments(key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
        keys = decode.row_keys(key, prompt.shape[0])
        return _generate(params, keys, prompt, prompt_length, sampling, pace, mesh=self.mesh, config=config, max_new_tokens=max_new_tokens)


@partial(jax.jit, static_argnames=("mesh", "config", "max_new_tokens"))
def _generate(params, keys, prompt, prompt_length, sampling, pace, *, mesh, config, max_new_tokens):
    run = partial(decode.generate, config=config, max_new_tokens=max_new_tokens)
    specs = param_specs(config), ROWS, ROWS, ROWS, ROWS, pace_specs() if pace is not None else None
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False)(params, keys, prompt, prompt_length, sampling, pace)
