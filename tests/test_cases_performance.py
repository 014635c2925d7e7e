"""Group k of the cases: 61 (no host round trip) and 62 (no recompilation)."""

import dataclasses
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import (
    BATCH,
    NEW,
    VERIFIERS,
    VOCAB,
    WIDTH,
    WINDOW,
    compilations,
    inputs,
    sampling_rows,
    table_config,
)

from specjax import compiled
from specjax.drafters.ngram import NGramDrafter
from specjax.drafters.none import NoDrafter
from specjax.sampling import logit_bias, sampling_params
from specjax.types import Params
from specjax.verify import Greedy

PARAMS = Params(target=jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(VOCAB, VOCAB)), jnp.float32))
REPEATS = [1, 2, 3, 1, 2, 3]


NGRAM = table_config(NGramDrafter(num_tokens=WINDOW), Greedy())


def arguments(prompts=(REPEATS,), seeds=0, **sampling):
    return PARAMS, *inputs(prompts, seeds), sampling_rows(len(prompts), **sampling)


# ---- Case 61 ----


def test_case_61_one_launch_whatever_the_length(monkeypatch):
    """1, 10 and 32 tokens are one call of one compiled program each."""
    launches, launch = [], compiled._generate
    monkeypatch.setattr(compiled, "_generate", lambda *args, **options: launches.append(1) or launch(*args, **options))
    for limit in (1, 10, NEW):
        output = compiled.generate(*arguments(max_tokens=limit), config=NGRAM, max_new_tokens=NEW)
        assert output.length[0] == limit
    assert len(launches) == 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gossip(NoDrafter):
    """Calls the host on every step."""

    def draft(self, params, keys, state, context, sampling, cache):
        jax.debug.callback(lambda length: None, context.length)
        return super().draft(params, keys, state, context, sampling, cache)


def test_case_61_the_program_never_calls_the_host():
    """Nothing in what is compiled leaves the device; a drafter that does shows."""

    def hosts(config):
        text = compiled._generate.lower(*arguments(), config=config, max_new_tokens=NEW).as_text()
        assert "stablehlo.while" in text
        return any(name in text for name in ("callback", "infeed", "outfeed", "send", "recv"))

    for verifier in VERIFIERS:
        assert not hosts(dataclasses.replace(NGRAM, verifier=verifier))
    assert hosts(table_config(_Gossip()))


@pytest.fixture
def reads(monkeypatch):
    """The shapes of the device arrays whose values go to the host, whether by `int()`, `bool()` or `np.asarray`."""
    shapes, array, to_numpy = [], type(jnp.zeros(1)), np.asarray
    value = array._value

    def asarray(data, *args, **options):
        before = len(shapes)
        converted = to_numpy(data, *args, **options)
        shapes[before:] = [data.shape] if isinstance(data, jax.Array) else []
        return converted

    monkeypatch.setattr(array, "_value", property(lambda self: shapes.append(self.shape) or value.fget(self)))
    monkeypatch.setattr(np, "asarray", asarray)
    return shapes


def test_case_61_generate_reads_nothing_back(monkeypatch, reads):
    """After the check of its arguments it returns device arrays that nobody has waited for."""
    monkeypatch.setattr(compiled, "check_arguments", lambda *args, **options: None)
    given = arguments()
    reads.clear()
    output = compiled.generate(*given, config=NGRAM, max_new_tokens=NEW)
    assert reads == []
    assert int(output.length[0]) == NEW
    assert np.asarray(output.length).sum() == NEW
    assert reads == [(), (BATCH,)]


def test_case_61_a_stream_reads_only_the_finish_flags(reads):
    """Its Python loop has to: once before each step and after the last."""
    iterator = compiled.stream(*arguments(max_tokens=12), config=NGRAM, max_new_tokens=NEW)
    next(iterator)
    reads.clear()
    *_, last = iterator
    assert reads == [(BATCH,)] * len(reads)
    assert len(reads) == int(last.stats.steps.max())


# ---- Case 62 ----

SAMPLED = {
    "plain": {"temperature": 0.7},
    "hot": {"temperature": 1.0, "top_p": 0.9},
    "filters": {"temperature": 1.3, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "mixed": {"temperature": [0.0, 1.0], "top_p": [1.0, 0.5], "max_tokens": [7, 20], "min_tokens": [0, 4]},
}
COLD = {
    "lengths": {"max_tokens": 20},
    "one-stop": {"stop_token_ids": (2,)},
    "four-stops": {"stop_token_ids": (2, 3, 4, 5), "min_tokens": 3},
    "stops-per-row": {"stop_token_ids": [[], [7, 8]]},
}


@pytest.mark.parametrize("config", [NGRAM, table_config(NoDrafter())])
def test_case_62_nothing_recompiles(config):
    """After a warm-up: prompt lengths, limits, parameters, seeds, stop ids, weights, a short batch, an equal config."""
    requests = [arguments([REPEATS], max_tokens=3)[1:]]
    for index, sampling in enumerate((COLD if config is NGRAM else COLD | SAMPLED).values()):
        prompts = [(REPEATS * 3)[: 1 + index], (REPEATS * 3)[: WIDTH - index]]
        requests.append(arguments(prompts, seeds=index, **sampling)[1:])
    requests.append(arguments([REPEATS] * BATCH, seeds=100)[1:])
    weights = [PARAMS, PARAMS.replace(target=PARAMS.target[::-1])]
    compiled.generate(PARAMS, *requests[0], config=config, max_new_tokens=NEW)
    equal = table_config(dataclasses.replace(config.drafter), dataclasses.replace(config.verifier))
    with compilations() as programs:
        for request, params in itertools.product(requests, weights):
            compiled.generate(params, *request, config=equal, max_new_tokens=NEW)
    assert programs == []


def test_case_62_one_program_for_each_bucket():
    """Texts of 5 to 24 tokens in two buckets are two programs; a bias is a mode of its own, whatever its values."""
    plain, biased = [], []
    for length in (5, 16, 9, 17, 24, 12, 20):
        prompts = compiled.pad_prompts([[1] * length, [2] * 3])
        plain.append((jax.random.key(length), *prompts, sampling_params(2, max_tokens=length % 16)))
    for token in (3, 4):
        bias = logit_bias(VOCAB, bad_token_ids=[token])
        biased.append((*plain[0][:3], sampling_params(2, max_tokens=token, logit_bias=bias)))
    for requests, right in ((plain, 2), (biased, 1)):
        with compilations() as programs:
            for request in requests:
                decoding.generate(PARAMS, *request, config=table_config(NoDrafter(), Greedy()), max_new_tokens=16)
        assert len(programs) == right
