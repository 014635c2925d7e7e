"""What one program takes and moves, as numbers for JSON: from the compiler, and counted in what it made."""

from typing import Any

from specjax.planning.counts import attention, count_loop, count_step, host_transfers, made_like
from specjax.planning.hlo import Program, parse_program
from specjax.planning.memory import Refusal, compile_or_refuse, memory_use, num_bytes
from specjax.planning.programs import Lowered
from specjax.planning.traffic import Count, Traffic


def compile_steps(lowered: Lowered, window: int, context: int, sliding_window: int | None = None) -> dict[str, Any]:
    """Figures of `decode_steps`.

    Args:
      lowered: its programs.
      window: drafted tokens of its widest window; 0 without speculation.
      context: tokens in the longest row's cache.
      sliding_window: of the layers; None: some of them see everything.
    """
    state = lowered.state
    compiled = compile_or_refuse(lowered.steps, num_bytes((lowered.params, state.cache, state.draft_state)))
    if isinstance(compiled, Refusal):
        return refused(compiled)
    program = parse_program(compiled.as_text())
    known = attention(lowered.capacity, context, sliding_window)
    cheapest, dearest = (count_step(program, window, known, count) for count in Count)
    return _common(compiled, program) | {
        "step": _step(cheapest.whole, dearest.whole),
        "verify": _step(cheapest.verify, dearest.verify),
        "cache_copies": made_like(program, (state.cache, state.draft_state)),
    }


def compile_prefill(lowered: Lowered, context: int, sliding_window: int | None = None) -> dict[str, Any]:
    """Figures of `prefill`; `step` is one chunk, with `context` tokens before it."""
    compiled = compile_or_refuse(lowered.prefill, num_bytes(lowered.params))
    if isinstance(compiled, Refusal):
        return refused(compiled)
    program = parse_program(compiled.as_text())
    known = attention(lowered.capacity, context, sliding_window)
    return _common(compiled, program) | {"step": _step(*(count_loop(program, known, count) for count in Count))}


def refused(refusal: Refusal) -> dict[str, Any]:
    """Figures of a program that was refused; without sizes if that was not for its size."""
    return {
        "fits": False,
        "used": refusal.used,
        "available": refusal.available,
        "excess": refusal.excess,
        "message": refusal.message,
    }


def _common(compiled: Any, program: Program) -> dict[str, Any]:
    cost = compiled.cost_analysis()
    return {
        "fits": True,
        "memory": memory_use(compiled),
        "aliased_parameters": len(program.aliased),
        "host_transfers": host_transfers(program),
        "compiler": {"bytes_accessed": cost.get("bytes accessed"), "flops": cost.get("flops")},
    }


def _step(cheapest: Traffic, dearest: Traffic) -> dict[str, Any]:
    exchanged = {kind: sums for kind, sums in sorted(cheapest.collectives.items()) if sums[0]}
    return {
        "bytes": cheapest.num_bytes,
        "bytes_dearest": dearest.num_bytes,
        "collectives": {kind: {"count": count, "bytes": size} for kind, (count, size) in exchanged.items()},
    }
