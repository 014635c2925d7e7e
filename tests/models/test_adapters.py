"""Flax modules as target and as drafter: one tiny transformer in NNX and in Linen, with and without its own cache."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from programs import compilations

from specjax.decode import DecodeConfig
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.models.adapters import LinenModel, NNXModel
from specjax.sampling import sampling_params
from specjax.types import Params
from specjax.verify import Greedy

VOCAB, WIDTH, POSITIONS = 13, 16, 40

# ---- The modules ----


def whole(module, tokens):
    """Logits `[B, S, V]` of whole texts."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    query, key, value = project(module, tokens, positions)
    return module.head(attend(query, key, value, positions))


def step(module, tokens, positions, cache):
    """Logits `[B, T, V]` of new tokens against the cache they are written to."""
    query, *new = project(module, tokens, positions)
    slots = jnp.where(positions < 0, cache[0].shape[1], positions)
    rows = jnp.arange(len(tokens))[:, None]
    key, value = (old.at[rows, slots].set(x, mode="drop") for old, x in zip(cache, new, strict=True))
    return module.head(attend(query, key, value, positions)), (key, value)


def project(module, tokens, positions):
    x = module.embed(tokens) + module.place(jnp.clip(positions, 0, POSITIONS - 1))
    return jnp.split(3 * module.mix(x), 3, axis=-1)


def attend(query, key, value, positions):
    visible = jnp.arange(key.shape[1]) <= positions[:, :, None]
    scores = jnp.where(visible, jnp.einsum("btd,bsd->bts", query, key), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), value)


def empty(batch_size, capacity):
    return tuple(jnp.zeros((batch_size, capacity, WIDTH)) for _ in range(2))


class WholeNNX(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed, self.place = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
        self.mix, self.head = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return whole(self, tokens)


class CachedNNX(WholeNNX):
    def init_cache(self, batch_size, capacity):
        return empty(batch_size, capacity)

    def __call__(self, tokens, positions, cache):
        return step(self, tokens, positions, cache)


class WholeLinen(linen.Module):
    def setup(self):
        self.embed, self.place = linen.Embed(VOCAB, WIDTH), linen.Embed(POSITIONS, WIDTH)
        self.mix, self.head = linen.Dense(3 * WIDTH), linen.Dense(VOCAB)

    def __call__(self, tokens):
        return whole(self, tokens)


class CachedLinen(WholeLinen):
    def init_cache(self, batch_size, capacity):
        return empty(batch_size, capacity)

    def __call__(self, tokens, positions, cache):
        return step(self, tokens, positions, cache)


def adapt(kind, seed=0, **fields):
    """The adapted model, its params, and the logits of whole texts; both libraries get the same weights."""
    library, cached = kind
    fields = {"vocab_size": VOCAB, "max_positions": POSITIONS, "cached": cached} | fields
    module = WholeNNX(seed)
    graphdef, params = nnx.split(CachedNNX(seed) if cached else module)
    if library == "nnx":
        return NNXModel(graphdef=graphdef, **fields), params, module
    definition = CachedLinen() if cached else WholeLinen()
    return LinenModel(definition=definition, **fields), {"params": nnx.to_pure_dict(params)}, module


def answering(answer):
    """Modules of both libraries with a cache, which answer `answer(logits, cache)`; each adapted, with its params."""

    class NNX(CachedNNX):
        def __call__(self, tokens, positions, cache):
            return answer(*step(self, tokens, positions, cache))

    class Linen(CachedLinen):
        def __call__(self, tokens, positions, cache):
            return answer(*step(self, tokens, positions, cache))

    graphdef, state = nnx.split(NNX())
    fields = {"vocab_size": VOCAB, "max_positions": POSITIONS, "cached": True}
    linen_model = LinenModel(definition=Linen(), **fields)
    return (NNXModel(graphdef=graphdef, **fields), state), (linen_model, adapt(("linen", True))[1])


def call(model, params):
    return model.apply(params, TEXT[:, :3], jnp.array([[0, 1, 2]] * 2), model.init_cache(params, 2, 4))


KINDS = [(library, cached) for library in ("nnx", "linen") for cached in (True, False)]
LENGTHS = (11, 6)
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 11)), jnp.int32)


# ---- Logits ----


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_whole_text(kind):
    """Ragged rows in calls of 4 and 1, over stale slots of a rejected draft; padding is not written."""
    model, params, forward = adapt(kind)
    right, apply = np.asarray(forward(TEXT)), decoding.fast_jit(model.apply)
    cache = model.init_cache(params, 2, 20)
    assert cache.length.tolist() == [0, 0]
    wrong = jnp.broadcast_to(jnp.arange(5, 9), (2, 4))
    _, cache = apply(params, VOCAB - 1 - TEXT[:, 5:9], wrong, cache)
    for start, end in ((0, 4), (4, 5), (5, 9), (9, 10), (10, 11)):
        columns = jnp.arange(start, end)
        positions = jnp.where(columns < jnp.array(LENGTHS)[:, None], columns, -1)
        output, cache = apply(params, TEXT[:, start:end], positions, cache)
        assert output.logits.dtype == jnp.float32
        for row in range(2):
            known = columns < LENGTHS[row]
            np.testing.assert_allclose(output.logits[row][known], right[row, start:end][known], atol=2e-5)
    before = jax.tree.map(np.asarray, cache)
    _, after = apply(params, TEXT[:, :1], jnp.array([[0], [-1]]), cache)
    jax.tree.map(lambda old, new: np.testing.assert_array_equal(old[1], new[1]), before, after)


def test_logits_are_float32_whatever_the_module_gives():
    """Bfloat16 logits are widened, not computed anew."""
    for model, params in answering(lambda logits, cache: (logits.astype(jnp.bfloat16), cache)):
        logits = call(model, params)[0].logits
        right = call(*adapt(("nnx" if isinstance(model, NNXModel) else "linen", True))[:2])[0].logits
        assert logits.dtype == jnp.float32
        np.testing.assert_array_equal(logits, right.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_cannot_know(kind):
    """From `max_positions` on the logits are NaN; ids that only a wider target has are read as the nearest known."""
    model, params, forward = adapt(kind, max_positions=8)
    text = TEXT.at[0, 3].set(VOCAB + 5).at[1, 2].set(-7)
    positions = jnp.broadcast_to(jnp.arange(11), TEXT.shape)
    output, _ = decoding.fast_jit(model.apply)(params, text, positions, model.init_cache(params, 2, 20))
    right = forward(jnp.clip(text, 0, VOCAB - 1))
    np.testing.assert_allclose(output.logits[:, :8], right[:, :8], atol=2e-5)
    assert np.isnan(output.logits[:, 8:]).all()


# ---- Decoding ----

PROMPTS = [[1, 2, 3, 1, 2], [4]]
NEW = 20
NGRAM = NGramDrafter(num_tokens=3)


def decode(target, drafter, draft=None):
    """`generate`, greedily, for both prompts."""
    model, params, _ = target
    config = DecodeConfig(target=model, drafter=drafter, verifier=Greedy())
    weights, sampling = Params(target=params, draft=draft), sampling_params(2, max_tokens=NEW)
    prompts = decoding.pad(PROMPTS, 6)
    return decoding.generate(weights, jax.random.key(0), *prompts, sampling, config=config, max_new_tokens=NEW)


def by_whole_forwards(module):
    """What plain greedy decoding gives, with neither adapter nor decoder."""
    return [greedy(module, list(prompt))[len(prompt) :] for prompt in PROMPTS]


def greedy(module, text):
    for length in range(len(text), len(text) + NEW):
        padded = jnp.array([[*text, *[0] * (POSITIONS - length)]])
        text.append(int(jnp.argmax(module(padded)[0, length - 1])))
    return text


@pytest.mark.parametrize("kind", [("nnx", True), ("linen", False)])
def test_n_grams_before_a_module(kind):
    target = adapt(kind)
    output = decode(target, NGRAM)
    assert decoding.generated(output) == by_whole_forwards(target[2])
    assert (output.stats.accepted > 0).all()


@pytest.mark.parametrize(
    ("target", "draft", "seed"), [(("nnx", True), ("linen", True), 0), (("linen", False), ("nnx", False), 1)]
)
def test_a_module_before_a_module(target, draft, seed):
    """One library drafts for the other. With equal weights (seed 0) all is accepted: no hole, nothing stale."""
    target, (model, weights, _) = adapt(target), adapt(draft, seed)
    output = decode(target, ModelDrafter(model=model, num_tokens=3, vocab_size=VOCAB), weights)
    assert decoding.generated(output) == by_whole_forwards(target[2])
    assert (output.stats.drafted >= 15).all()
    assert (output.stats.accepted == output.stats.drafted).all() == (seed == 0)


def test_a_drafter_stands_down_at_its_last_position():
    """A drafter of 12 positions before a target of 40: all right up to there, and one token a step beyond."""
    target, (model, weights, _) = adapt(("nnx", True)), adapt(("linen", True), max_positions=12)
    output = decode(target, ModelDrafter(model=model, num_tokens=3, vocab_size=VOCAB), weights)
    assert decoding.generated(output) == by_whole_forwards(target[2])
    assert output.stats.drafted.tolist() == output.stats.accepted.tolist() == [6, 9]
    assert output.stats.steps.tolist() == [NEW - 6, NEW - 9]


def test_equal_modules_share_a_program():
    """A module split anew, with other weights, neither retraces nor recompiles."""
    for kind in (("nnx", True), ("linen", False)):
        decode(adapt(kind), NGRAM)
        again = adapt(kind, seed=5)
        with compilations() as programs:
            decode(again, NGRAM)
        assert programs == []
        assert adapt(kind)[0] == again[0]


# ---- Wrong contracts ----


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits, cache: logits, r"return \(logits, cache\), got float32\[2, 3, 13\]"),
        (lambda logits, cache: (logits, cache, 0), r"return \(logits, cache\)"),
        (lambda logits, cache: [logits, cache], r"return \(logits, cache\)"),
        (lambda logits, cache: (logits, cache[0]), "a cache like the one it was given"),
        (lambda logits, cache: (logits, tuple(x[:, 1:] for x in cache)), r"float32\[2, 4, 16\].*float32\[2, 3, 16\]"),
        (lambda logits, cache: (logits, tuple(x.astype(jnp.bfloat16) for x in cache)), "bfloat16"),
        (lambda logits, cache: (logits[..., 1:], cache), r"logits \[2, 3, 13\] .* got float32\[2, 3, 12\]"),
        (lambda logits, cache: (logits[:, -1], cache), r"logits \[2, 3, 13\] .* got float32\[2, 13\]"),
        (lambda logits, cache: (logits.astype(jnp.int32), cache), r"floating-point logits .* got int32"),
        (lambda logits, cache: ({"logits": logits}, cache), r"floating-point logits .* got \{'logits'"),
    ],
)
def test_a_wrong_answer_is_refused(answer, message):
    for model, params in answering(answer):
        with pytest.raises(ValueError, match=message):
            call(model, params)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_a_wrong_signature_is_refused(library):
    """`cached` says one thing and the module another."""
    (uncached, params, _), (cached, weights, _) = adapt((library, False)), adapt((library, True))
    field = {"nnx": "graphdef", "linen": "definition"}[library]
    fields = {"vocab_size": VOCAB, "max_positions": POSITIONS}
    claims = type(uncached)(**{field: getattr(uncached, field)}, **fields, cached=True)
    denies = type(cached)(**{field: getattr(cached, field)}, **fields, cached=False)
    with pytest.raises(ValueError, match=r"init_cache\(batch_size, capacity\), got no such method: see `cached`"):
        call(claims, params)
    with pytest.raises(ValueError, match=r"__call__\(tokens\), got __call__\(tokens, positions, cache\): see `cached`"):
        call(denies, weights)


def test_logits_of_a_whole_text_are_checked_too():
    model, params, _ = adapt(("linen", False))
    narrow = LinenModel(definition=model.definition, vocab_size=VOCAB + 1, max_positions=POSITIONS)
    with pytest.raises(ValueError, match=r"logits \[2, 4, 14\] from the module, got float32\[2, 4, 13\]"):
        call(narrow, params)
