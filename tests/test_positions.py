"""Angles, registry, and the protocol as a newcomer uses it."""

import dataclasses
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ScoreMod
from tape_jax import positions
from tape_jax.positions import rotary
from tests.tiny import logits, random_params, run, tiny, tokens


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_phases_at_far_positions(base, factor):
    """Within 1e-3 of float64 up to 2^20, negative positions included."""
    where = np.array([0, 1, 2, 4095, 65_535, 131_071, 1_000_000, -1, -37])
    freqs = rotary.frequencies(64, base) / factor
    got = np.asarray(rotary.phases(jnp.asarray(where), freqs))
    angles = where[:, None] * freqs
    want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    error = np.abs(got - want).max(-1)
    assert error.max() < 1e-3
    assert error[np.abs(where) < 4096].max() < 4e-6
    assert got.dtype == np.float32


def test_adjacent_positions_differ_everywhere():
    where = jnp.asarray([0, 4095, 65_535, 131_070])
    freqs = rotary.frequencies(64, 1e4)
    step = rotary.phases(where + 1, freqs) - rotary.phases(where, freqs)
    assert float(jnp.abs(step).max(-1).min()) > 0.1


def test_frequencies_are_exact():
    got = rotary.frequencies(8, 10_000.0)
    assert [Fraction(x).limit_denominator(10_000) for x in got] == [
        1,
        Fraction(1, 10),
        Fraction(1, 100),
        Fraction(1, 1000),
    ]


def test_linear_scaling_is_positions_divided():
    plain, halved = (
        tiny(position="rope"),
        tiny(position=positions.RoPE(scaling=positions.LinearScaling(2.0))),
    )
    params, ids = random_params(plain), tokens(plain)
    where = jnp.arange(ids.shape[1])[None]
    np.testing.assert_allclose(
        logits(halved, params, ids, positions=2 * where),
        logits(plain, params, ids, positions=where),
        atol=1e-4,
    )


def test_shift_moves_default_positions_only():
    moved, plain = tiny(position=positions.Tape(shift=5)), tiny()
    params, ids = random_params(plain), tokens(plain)
    where = jnp.arange(ids.shape[1])[None]
    states = run(moved, params, ids)[2]
    np.testing.assert_array_equal(states, run(plain, params, ids, positions=where + 5)[2])
    np.testing.assert_array_equal(
        run(moved, params, ids, positions=where)[2], run(plain, params, ids)[2]
    )


def test_grouped_queries_read_their_groups_state():
    """K/V heads repeated G times, each with its own state, are the same model without groups."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    state = np.random.default_rng(1).normal(size=(2, 3, 2, 8)).astype(np.float32)
    np.testing.assert_array_equal(
        rotary.rotate_heads(x, state), rotary.rotate_heads(x, np.repeat(state, 2, axis=2))
    )


class _Slopes(nn.Module):
    heads: int

    @nn.compact
    def __call__(self):
        return self.param("slopes", nn.initializers.constant(0.5), (self.heads,))


@dataclasses.dataclass(frozen=True)
class Toy(positions.Encoding):
    """An encoding made of every hook that TAPE does not use: absolute, additive and learned."""

    name: str = "toy"

    def embed(self, x, positions):
        return x + jnp.sin(positions.astype(x.dtype))[..., None]

    def score_mod(self, q, q_positions, k_positions, config):
        slopes = _Slopes(config.num_heads, name="position")()

        def add(scores, q_index, k_index):
            distance = q_positions[:, q_index, None] - k_positions[:, None, k_index]
            return scores - slopes[:, None, None] * distance[:, None]

        return ScoreMod(add)


@pytest.mark.parametrize("scan", [True, False])
def test_a_new_encoding_needs_only_its_hooks(scan):
    config = tiny(position=Toy(), scan_layers=scan)
    params, ids = random_params(config), tokens(config)
    assert params["layers"]["attention"]["position"]["slopes"].shape == (3, 4)
    base = jnp.arange(ids.shape[1])[None]
    start = logits(config, params, ids)
    np.testing.assert_array_equal(start, logits(config, params, ids, positions=base))
    moved = logits(config, params, ids, positions=base + 3)  # absolute: not shift invariant
    assert float(jnp.abs(moved - start).max()) > 1e-2


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_additive_encoding_learns_through_the_tiled_attention(scan, remat):
    """Its score modifier closes over explicit positions (traced integers) and learned slopes."""
    tiled = tiny(position=Toy(), scan_layers=scan, remat=remat, attention="xla")
    plain = tiny(position=Toy(), scan_layers=scan, attention="reference")
    params, ids = random_params(plain, scale=0.2), tokens(plain)
    where = jnp.asarray([[3 * i + row for i in range(ids.shape[1])] for row in (0, 5)])

    def gradients(config):
        loss = lambda p, w: (logits(config, p, ids, positions=w) ** 2).mean()  # noqa: E731
        return jax.jit(jax.grad(loss))(params, where)

    for got, want in zip(
        jax.tree.leaves(gradients(tiled)), jax.tree.leaves(gradients(plain)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


def test_registry():
    assert positions.get("rope", base=5e5) == positions.RoPE(base=5e5)
    for name in positions.names():
        assert positions.get(name).name == name
    with pytest.raises(ValueError, match=r"unknown positional encoding 'tpe'; did you mean tape"):
        positions.get("tpe")
    with pytest.raises(ValueError, match=r"unknown field of position 'rope' 'bas'; .*base"):
        positions.get("rope", bas=3)
