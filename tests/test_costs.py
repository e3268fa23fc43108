"""What encodings cost: the two benchmarks that count it, at sizes that take seconds."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from benchmarks import attention, costs, efficiency, encodings
from pallas_kernels import IMPLEMENTATIONS, reference, tape_attention
from tape_jax import ModelConfig, positions
from tape_jax.positions import NoPE


@dataclasses.dataclass(frozen=True)
class Unfinished(NoPE):
    name: str = "unfinished"

    def rotate(self, q, k, state, positions, config):
        raise NotImplementedError("to be written")


# --- efficiency -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_efficiency_of_every_registered_encoding(tmp_path, monkeypatch):
    monkeypatch.setitem(positions.ENCODINGS, "unfinished", Unfinished)
    efficiency.run(efficiency.Benchmark(layers=2, length=128, rounds=2, out=tmp_path))
    report = json.loads((tmp_path / "efficiency.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) >= {*positions.names(), "tape, separate"} and "rope, separate" not in rows
    assert "to be written" in rows["unfinished"]["error"]
    base = rows["rope"]["figures"]
    for name in ("nope", "rope", "tape", "tape, separate"):
        row = rows[name]
        assert row["error"] is None and set(row["figures"]) == set(efficiency.MEASURES)
        for measure, ratio in row["ratios"].items():
            assert ratio == pytest.approx(row["figures"][measure] / base[measure])
    tape, separate = rows["tape"]["figures"], rows["tape, separate"]["figures"]
    assert tape["state_bytes"] == 12 * 64 * 4 and base["state_bytes"] == 64 * 4
    # One layer mixes the state: 12 N^2 D H operations in three calls against 6 fused.
    calls = 1e9 * (separate["gflop"] - tape["gflop"]) / (128**2 * 768)
    assert 6.0 <= calls < 7.0
    assert rows["tape"]["paper_ratios"]["gflop"] == pytest.approx(365.65 / 321.10)
    assert rows["tape, separate"]["paper_ratios"] == {
        "iterations_per_second": pytest.approx(1775 / 4810)
    }
    assert "separate" not in IMPLEMENTATIONS
    assert (tmp_path / "efficiency.png").read_bytes()[:4] == b"\x89PNG"


def test_separate_calls_give_what_the_fused_attention_gives():
    q, k, v, e = attention.Shape(2, 20, 2, 16).arrays("float32")
    variant = efficiency.Variant(positions.Tape(), separate=True)
    want = tape_attention(q, k, v, e, implementation="reference")
    for apart in (False, True):
        with variant.attention("reference", apart) as name:
            got = tape_attention(q, k, v, e, implementation=name)
            assert tape_attention(q, k, v, implementation=name)[1] is None
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


# --- encodings ------------------------------------------------------------------------------------


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2}


@pytest.mark.slow
def test_costs_of_encodings_and_one_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "ModelConfig", functools.partial(ModelConfig, **SMALL))
    monkeypatch.setitem(positions.ENCODINGS, "unfinished", Unfinished)
    names = ("tape", "cope", "unfinished")
    encodings.run(encodings.Benchmark(names, layers=5, length=512, out=tmp_path))
    report = json.loads((tmp_path / "encodings.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["rope", *names]
    assert "to be written" in rows["unfinished"]["error"] and not rows["unfinished"]["figures"]

    tape, cope = rows["tape"]["figures"], rows["cope"]["figures"]
    assert rows["tape"]["over_rope"]["parameters"] == 5 * (2 * 2 + 2 * 8 * 2 + 32 * 8)
    assert rows["cope"]["over_rope"]["parameters"] == 5 * 64 * 16
    assert tape["state_bytes"] == 2 * 16 * 4 and cope["state_bytes"] == 0
    assert encodings.is_linear(tape) and not encodings.is_linear(cope)
    config = ModelConfig(position=positions.Tape(), num_layers=5, attention="reference", **SMALL)
    whole = costs.forward(config, 512).compile().cost_analysis()["flops"] / 1e9
    assert tape["gflop"] == pytest.approx(whole, rel=2e-3)
    assert (tmp_path / "encodings.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("tape", {"reference", "xla", "pallas", "cudnn", "tpu"}),
        ("alibi", {"reference", "xla", "pallas"}),
        ("fire", {"reference", "xla"}),
        ("cope", {"reference"}),
    ],
)
def test_implementations_of_an_encoding(name, takes):
    config = ModelConfig(position=name, **SMALL)
    assert set(costs.implementations(config)) - {"triton"} == takes
    assert IMPLEMENTATIONS["reference"].attend is reference.reference  # put back


def test_a_state_that_learns_its_start():
    config = ModelConfig(position="tape-learned", **SMALL)
    assert costs.state(config, 7).shape == (1, 7, 2, 16)
    assert costs.state(ModelConfig(position="nope", **SMALL), 7) is None
