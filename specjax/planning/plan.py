"""The plan: each program compiled and counted at each batch size, then what speculation would gain, modelled."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.decode import DecodeConfig, without_speculation
from specjax.drafters.model import ModelDrafter
from specjax.jobs.runtime import matmul_precision
from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.parallel.mesh import DATA, MODEL, make_mesh
from specjax.parallel.specs import on_mesh
from specjax.planning.figures import compile_prefill, compile_steps
from specjax.planning.gain import WINDOWS, model_batch, most_rows
from specjax.planning.hardware import Chip, check_topology, describe
from specjax.planning.programs import Lowered, Workload, lower
from specjax.planning.roofline import Model, Pair, estimated_bytes
from specjax.verify import Rejection

MODELLED = (
    "Compiled: memory, bytes, collectives, aliasing. Modelled, not measured: the least bytes and flops, every time, "
    "speed-up, best window and break-even batch. No TPU was there."
)
PROGRAMS = ("prefill", "plain", "speculative")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned."""

    target_name: str
    draft_name: str
    target: TransformerConfig
    draft: TransformerConfig
    topology: str
    batch_sizes: tuple[int, ...]
    """Rows on all devices together."""
    context: int
    """Tokens of the longest text, at whose end a step is counted."""
    max_new_tokens: int
    """How many of them are generated."""
    num_speculative_tokens: int
    parallel: str = "shard_map"
    """One of `programs.MAPS`."""
    data: int = 1
    model: int | None = None
    """Devices of the model axis; None: all that are left."""
    dtype: str = "bfloat16"
    shard_drafter: bool = False
    programs: tuple[str, ...] = PROGRAMS
    """Those of `PROGRAMS` that are compiled; each takes minutes."""

    def __post_init__(self) -> None:
        _, devices = check_topology(self.topology)
        if self.data * self.parts > devices or self.parts < 1:
            raise ValueError(f"expected a mesh of at most {devices} devices, got {self.data} x {self.parts}")
        if not 0 < self.max_new_tokens < self.context:
            raise ValueError(f"expected new tokens in 1..{self.context - 1}, got {self.max_new_tokens}")
        if self.context > self.target.max_positions:
            raise ValueError(
                f"expected a context within the target's {self.target.max_positions} positions, got {self.context}"
            )
        wrong = [size for size in self.batch_sizes if size < 1 or size % self.data]
        if wrong or not self.batch_sizes:
            raise ValueError(
                f"expected batch sizes that are multiples of data={self.data}, got {list(self.batch_sizes)}"
            )
        if not self.programs or not {*self.programs} <= {*PROGRAMS}:
            raise ValueError(f"expected programs among {', '.join(PROGRAMS)}, got {', '.join(self.programs) or 'none'}")
        if not 1 <= self.num_speculative_tokens <= WINDOWS[-1]:
            raise ValueError(f"expected 1 to {WINDOWS[-1]} speculative tokens, got {self.num_speculative_tokens}")

    @property
    def parts(self) -> int:
        """Devices of the model axis."""
        return check_topology(self.topology)[1] // self.data if self.model is None else self.model

    @property
    def chip(self) -> Chip:
        """The chip, its peak that of the weights' dtype."""
        return check_topology(self.topology)[0].in_dtype(self.dtype)

    @property
    def sliding_window(self) -> int | None:
        """The widest of all layers of both models; None: some see everything."""
        windows = [one for config in (self.target, self.draft) for one in config.sliding_windows or (None,)]
        return None if None in windows else max(one for one in windows if one is not None)

    def decoder(self) -> DecodeConfig:
        """The decoder, its models cut over the mesh."""
        drafter = ModelDrafter(
            model=Transformer(self.draft),
            num_tokens=self.num_speculative_tokens,
            vocab_size=self.target.vocab_size,
        )
        config = DecodeConfig(target=Transformer(self.target), drafter=drafter, verifier=Rejection())
        return on_mesh(config, draft=MODEL if self.shard_drafter else None)


def make_plan(request: Request, say: Say) -> Iterator[dict[str, Any]]:
    """Compiles and counts everything that is asked for, one batch size after the other.

    Args:
      request: what to plan.
      say: told what happens, since compiling takes minutes.

    Yields:
      The figures so far, for JSON, after each batch size: it takes minutes.

    Raises:
      ValueError: libtpu is missing, or something that does not go together.
    """
    mesh = make_mesh(request.data, request.parts, devices=describe(request.topology))
    plan = {
        "note": MODELLED,
        "versions": {name: version(name) for name in ("jax", "libtpu")},
        "settings": _settings(request),
        "chip": dataclasses.asdict(request.chip),
        "mesh": {DATA: request.data, MODEL: request.parts},
        "batches": [],
    }
    for batch in request.batch_sizes:
        with jax.default_matmul_precision(matmul_precision(request.dtype)):
            plan = plan | {"batches": [*plan["batches"], _plan_batch(request, batch, mesh, say)]}
        yield plan


def _plan_batch(request: Request, batch: int, mesh: Mesh, say: Say) -> dict[str, Any]:
    """Every program at one batch size, and what is modelled from them."""
    config, chip = request.decoder(), request.chip
    work = Workload(
        config=config,
        dtype=jnp.dtype(request.dtype),
        batch_size=batch,
        prompt_width=request.context - request.max_new_tokens,
        max_new_tokens=request.max_new_tokens,
    )
    speculative = lower(work, mesh, request.parallel)
    plain = lower(dataclasses.replace(work, config=without_speculation(config)), mesh, request.parallel)
    window = request.num_speculative_tokens
    text = request.context, request.sliding_window
    compile_of = {
        "prefill": lambda: compile_prefill(speculative, *text),
        "plain": lambda: compile_steps(plain, 0, *text),
        "speculative": lambda: compile_steps(speculative, window, *text),
    }
    programs = {}
    for name in request.programs:
        say(f"batch {batch}: compiling {name}")
        start = time.monotonic()
        programs[name] = compile_of[name]() | {"compile_seconds": time.monotonic() - start}
        if "message" in programs[name]:
            say(f"batch {batch}: {name} was refused: {programs[name]['message'].splitlines()[0]}")
    pair, rows = model_pair(request, speculative), batch // request.data
    most = most_rows(pair, speculative.capacity, window, chip)
    return {
        "batch_size": batch,
        "rows_per_device": rows,
        "programs": programs,
        "least": _least(pair, rows, window, chunk=min(config.prefill_chunk, work.prompt_width)),
        "estimated_bytes": estimated_bytes(pair, speculative.capacity, rows, window),
        "estimated_most_rows_per_device": most,
        "modelled": model_batch(pair, programs, chip, rows, window, most=most),
    }


def model_pair(request: Request, lowered: Lowered) -> Pair:
    """The two models as a device has them."""
    parts, draft_parts = request.parts, request.parts if request.shard_drafter else 1
    heads, draft_heads = (cache.keys[0].shape[1] for cache in (lowered.state.cache, lowered.state.draft_state))
    return Pair(
        target=Model(config=request.target, params=lowered.params.target, kv_heads=heads, parts=parts),
        draft=Model(config=request.draft, params=lowered.params.draft, kv_heads=draft_heads, parts=draft_parts),
        context=request.context,
    )


def _least(pair: Pair, rows: int, window: int, chunk: int) -> dict[str, Any]:
    """The least that each part of a step, and a chunk of the prompt at the end of the text, can move and compute."""
    parts = {
        "prefill": pair.read(rows, chunk),
        "plain": pair.plain(rows),
        "verify": pair.verify(rows, window),
        "drafting": pair.drafting(rows, window),
        "step": pair.step(rows, window),
    }
    return {name: {"bytes": work.traffic.num_bytes, "flops": work.flops} for name, work in parts.items()}


def _settings(request: Request) -> dict[str, Any]:
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return values | {name: dataclasses.asdict(values[name]) for name in ("target", "draft")}
