"""scripts/benchmark_huggingface.py: which models its baseline stands for."""

import dataclasses

import pytest
from checkpoint_writers import tiny

pytest.importorskip("torch", reason="the baseline needs torch (extra bench)")
pytest.importorskip("transformers", reason="the baseline needs transformers (extra bench)")


@dataclasses.dataclass
class Checkpoint:
    config: object
    params: object = None
    eos_ids: tuple[int, ...] = (0,)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": {"scaling": "linear", "factor": 2.0}},
        {"rope": {"frequency_factors": (1.0, 2.0, 3.0, 4.0)}},
        {"sliding_windows": (4, 4)},
        {"attention_bias": True},
        {"activation": "gelu_tanh"},
    ],
)
def test_a_model_that_would_become_another_one_is_refused(script, changes, monkeypatch):
    plain = tiny(num_layers=2, head_dim=8)
    rope = dataclasses.replace(plain.rope, **changes.pop("rope", {}))
    other = dataclasses.replace(plain, rope=rope, **changes)
    monkeypatch.setattr(script, "to_state_dict", lambda config, params: {})
    with pytest.raises(ValueError, match=r"expected the weights to fit"):
        script.HuggingFace(Checkpoint(plain), "float32")
    with pytest.raises(ValueError, match=r"expected a plain Llama, as which the baseline is built, got one with more"):
        script.HuggingFace(Checkpoint(other), "float32")
