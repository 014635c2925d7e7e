"""A step found in a program written by hand that loops like `decode_steps`: drafting, then one loop for each window."""

import jax
import jax.numpy as jnp
import pytest

from specjax.models.attention import BLOCK
from specjax.planning.counts import attention, count_loop, count_step, host_transfers, made_like, main_loop
from specjax.planning.hlo import parse_program, walk
from specjax.planning.traffic import Count

STEPS = "jit(decode_steps)/while"
LAYER = f"{STEPS}/body/while/body/jit(_run_layer)"
NEGATE, COPY = 2 * 40, 40 + 4000
TEXT = f"""HloModule test

%go (a: f32[10]) -> pred[] {{
  %a = f32[10] parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%token (b: f32[10]) -> f32[10] {{
  %b = f32[10] parameter(0)
  ROOT %drafted = f32[10] negate(%b)
}}

%propose (c: f32[10]) -> f32[10] {{
  %c = f32[10] parameter(0)
  ROOT %tokens = f32[10] while(%c), condition=%go, body=%token, metadata={{op_name="{STEPS}/body/while/body/while"}}
}}

%narrow (d: f32[10]) -> f32[10] {{
  %d = f32[10] parameter(0)
  ROOT %copied = f32[2,1,500] copy(%d)
}}

%wide (g: f32[10]) -> f32[10] {{
  %g = f32[10] parameter(0)
  %blocks = f32[10] while(%g), condition=%go, body=%token, metadata={{op_name="{LAYER}/while"}}
  ROOT %kept = f32[2,1,500] dynamic-update-slice(%g, %blocks, %g)
}}

%body (h: f32[10]) -> f32[10] {{
  %h = f32[10] parameter(0)
  %sorted = f32[10] while(%h), condition=%go, body=%token, metadata={{op_name="{STEPS}/body/jit(searchsorted)/while"}}
  %draft = f32[10] while(%sorted), condition=%go, body=%propose, metadata={{op_name="{STEPS}/body/while"}}
  %plain = f32[10] while(%draft), condition=%go, body=%narrow, metadata={{op_name="{STEPS}/body/while"}}
  ROOT %verify = f32[10] while(%plain), condition=%go, body=%wide, metadata={{op_name="{STEPS}/body/while"}}
}}

ENTRY %main (i: f32[10]) -> f32[10] {{
  %i = f32[10] parameter(0)
  %warm = f32[10] while(%i), condition=%go, body=%token
  ROOT %steps = f32[10] while(%warm), condition=%go, body=%body, metadata={{op_name="{STEPS}"}}
}}
"""
PROGRAM = parse_program(TEXT)


def step(window, context, capacity=400):
    return count_step(PROGRAM, window, attention(capacity, context), Count.DEAREST)


def test_the_main_loop_is_the_largest():
    assert main_loop(PROGRAM).name == "steps"


def test_a_step_drafts_every_token_and_runs_the_widest_window_alone():
    """Beside them it sorts once; one block of attention holds 200 tokens; 40 bytes are kept."""
    found, update = step(4, 200), 2 * 40
    assert found.verify.num_bytes == NEGATE + update
    assert found.whole.num_bytes == found.verify.num_bytes + 4 * NEGATE + NEGATE


def test_attention_goes_as_far_as_the_context():
    """Blocks are small in a buffer that holds no more than a large one."""
    assert step(4, 257).verify.num_bytes - step(4, 256).verify.num_bytes == NEGATE
    far, near = (step(4, context, 4 * BLOCK).verify.num_bytes for context in (3 * BLOCK + 1, 3 * BLOCK))
    assert far - near == NEGATE


def test_every_window_counts_where_no_step_is_looked_for():
    known = attention(400, 200)
    assert count_loop(PROGRAM, known, Count.DEAREST).num_bytes == step(1, 200).whole.num_bytes + COPY


def test_a_program_without_such_loops_is_refused():
    plain = TEXT.replace(f'op_name="{STEPS}/body/while"', 'op_name="other"')
    with pytest.raises(ValueError, match="expected a loop for each of 2 windows in the decoding loop, got 0"):
        count_step(parse_program(plain), 4, lambda one: None, Count.DEAREST)
    with pytest.raises(ValueError, match="expected a program with a loop"):
        main_loop(parse_program("HloModule test\nENTRY %main (i: f32[1]) -> f32[1] {\n  %i = f32[1] parameter(0)\n}\n"))


def test_the_host_is_found_in_branches_and_windows_that_are_not_counted():
    """One call in the plain window, one in the cheaper branch of a conditional, one before the loop."""
    call = 'f32[10] custom-call(%d), custom_call_target="xla_ffi_python_cpu_callback"'
    text = TEXT.replace("%copied = f32[2,1,500] copy(%d)", f"%told = {call}")
    text = text.replace("%warm = f32[10] while(%i)", "%warm = f32[10] infeed(%i)")
    choice = "%kept = f32[10] conditional(%g, %g, %g), branch_computations={%silent, %telling}"
    text = text.replace("%kept = f32[2,1,500] dynamic-update-slice(%g, %blocks, %g)", choice)
    branches = [
        "%silent (j: f32[10]) -> f32[2,1,500] {\n  %j = f32[10] parameter(0)\n  ROOT %large = f32[2,1,500] copy(%j)\n}",
        f"%telling (d: f32[10]) -> f32[10] {{\n  %d = f32[10] parameter(0)\n  ROOT %call = {call}\n}}",
    ]
    program = parse_program(text.replace("ENTRY", "\n\n".join([*branches, "ENTRY"])))
    assert host_transfers(program) == 2
    assert host_transfers(PROGRAM) == 0


def test_attention_begins_where_a_sliding_window_does():
    """Blocks of 1,024 up to a text of 4,000; the last query but one of a window of 1,000 is at 3,001."""
    (loop,) = [one for _, one in walk(PROGRAM) if one.name == "blocks"]
    capacity = 8 * BLOCK
    assert attention(capacity, 4000)(loop) == 4
    assert attention(capacity, 4000, 1000)(loop) == 2
    assert attention(capacity, 4000, 929)(loop) == attention(capacity, 4000, 5)(loop) == 1
    assert attention(capacity, 4000, 9000)(loop) == 4


def test_copies_of_a_cache_are_found_and_updates_in_place_are_not():
    cache = [jax.ShapeDtypeStruct((2, 500, 1), jnp.float32), jax.ShapeDtypeStruct((10,), jnp.float32)]
    assert made_like(PROGRAM, cache) == ["copy copied"]
