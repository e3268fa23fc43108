"""Score modifiers in every implementation that takes them, against float64 by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, LinearBias, ScoreMod, tape_attention
from pallas_kernels.reference import LOWEST
from tests import test_attention
from tests.kernels_on_cpu import run_on_cpu
from tests.test_attention import (
    causal_mask,
    check,
    inputs,
    order_mask,
    relative_rms,
    truth,
)
from tests.tiny import mostly_slow

attend = test_attention.attend


def refuses_functions(attend, *arrays, **arguments):
    """Whether it refuses a `ScoreMod` as it should."""
    kinds = ("score_mod", "score_mod of kind ScoreMod")
    return any(attend.refuses(kind, *arrays, **arguments) for kind in kinds)


# --- Functions of tiles ---------------------------------------------------------------------------


def slopes_mod(slopes):
    def mod(scores, q_index, k_index):
        assert scores.shape[-2:] == (q_index.shape[0], k_index.shape[0])
        return scores - slopes[:, None, None] * (q_index[:, None] - k_index[None, :])

    return ScoreMod(mod)


def test_score_mod_and_the_gradient_of_what_it_learns(attend):
    """Additive slopes per head: values, every gradient, and the slopes' own."""
    n, arrays = 50, inputs(50, 50)
    slopes = jnp.asarray([0.5, 0.25, 0.1, 0.01])
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    bias = -np.asarray(slopes, np.float64)[:, None, None] * distance
    if refuses_functions(attend, *arrays[:4], score_mod=slopes_mod(slopes)):
        return
    check(attend, arrays, causal_mask(n), bias=bias, score_mod=slopes_mod(slopes))

    q, k, v, e, d_out, d_mixed = arrays

    def loss(slopes):
        out, mixed = attend(q, k, v, e, score_mod=slopes_mod(slopes))
        return (out * d_out).sum() + (mixed * d_mixed).sum()

    def exact(slopes):
        bias = -np.asarray(slopes, np.float64)[:, None, None] * distance
        (out, mixed, _), _ = truth(q, k, v, e, causal_mask(n), 0.25, d_out, d_mixed, bias)
        return (out * d_out).sum() + (mixed * d_mixed).sum()

    got = jax.jit(jax.grad(loss))(slopes)
    step = 1e-5 * np.eye(4)
    start = np.asarray(slopes, np.float64)
    want = [(exact(start + d) - exact(start - d)) / 2e-5 for d in step]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


PARTS = (6, 10)
"""Channels of the two products of `turned`."""


def turned(rates):
    """The first product, scaled by the cosine of the second times what each head learns."""
    return ScoreMod(lambda s, i, j: s[0] * jnp.cos(s[1] * rates[:, None, None]), parts=PARTS)


def exactly_turned(q, k, v, e, rates, cotangents):
    """<out, d_out> + <mixed, d_mixed> of `turned` scores, in float64."""
    pieces = (np.split(x, [PARTS[0]], axis=-1) for x in (q, k.repeat(2, axis=2)))
    first, second = (
        0.25 * np.einsum("bnhd,bmhd->bhnm", *piece) for piece in zip(*pieces, strict=True)
    )
    scores = first * np.cos(second * rates[:, None, None])
    mask = causal_mask(q.shape[1])
    outs, _ = truth(0 * q, k, v, e, mask, 1.0, *cotangents, bias=scores)
    return sum((x * d).sum() for x, d in zip(outs, cotangents, strict=False))


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_parts_of_the_product(name, monkeypatch):
    """Values, and derivatives along random directions of each array and of what it learns."""
    run_on_cpu(name, monkeypatch)
    *arrays, d_out, d_mixed = inputs(50, 50)
    rates = np.array([0.5, 1.0, 2.0, 0.1], np.float32)

    def loss(q, k, v, e, rates):
        out, mixed = tape_attention(q, k, v, e, score_mod=turned(rates), implementation=name)
        return (out * d_out).sum() + (mixed * d_mixed).sum()

    arguments = [x.astype(np.float64) for x in (*arrays, rates)]
    exact = lambda *a: exactly_turned(*a, (d_out, d_mixed))  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=range(5)))(*arrays, rates)
    np.testing.assert_allclose(value, exact(*arguments), rtol=1e-5, atol=1e-4)
    rng = np.random.default_rng(1)
    for i, gradient in enumerate(gradients):
        along = rng.normal(size=gradient.shape)
        ahead, behind = (
            exact(*arguments[:i], arguments[i] + step * along, *arguments[i + 1 :])
            for step in (1e-5, -1e-5)
        )
        np.testing.assert_allclose((gradient * along).sum(), (ahead - behind) / 2e-5, rtol=1e-4)


def test_parts_that_do_not_add_up():
    arrays, mod = inputs(5, 5)[:4], ScoreMod(lambda s, i, j: s[0], parts=(8, 4))
    with pytest.raises(ValueError, match=r"score_mod.parts=\(8, 4\) .* add up to the width 16"):
        tape_attention(*arrays, score_mod=mod)


# --- Functions of whole rows ----------------------------------------------------------------------


def counted(xp, scores):
    """Scores that fall with the number of keys from a key on, each counted by its sigmoid."""
    gates = 1 / (1 + xp.exp(-xp.maximum(scores, -80.0))) * (scores > LOWEST / 2)
    return scores - 0.1 * xp.flip(xp.cumsum(xp.flip(gates, -1), -1), -1)


def test_whole_rows_see_the_mask():
    """Keys after a query are not counted; only "reference" can, and is taken without a name."""
    n, arrays = 70, inputs(70, 70)  # more scores than are written out anyway
    q, k, v, e, d_out, d_mixed = arrays
    mod = ScoreMod(lambda s, i, j: counted(jnp, s), whole_rows=True)
    products = 0.25 * np.einsum("bnhd,bmhd->bhnm", *(x.astype(float) for x in (q, k.repeat(2, 2))))
    scores = counted(np, np.where(causal_mask(n)[:, None], products, LOWEST))
    (*want, _), _ = truth(0 * q, k, v, e, causal_mask(n), 1.0, d_out, d_mixed, bias=scores)
    got = jax.jit(lambda *a: tape_attention(*a, score_mod=mod))(q, k, v, e)
    for ours, theirs in zip(got, want, strict=True):
        assert relative_rms(ours, theirs) < 2e-6
    for name in IMPLEMENTATIONS.keys() - {"reference"}:
        with pytest.raises(ValueError, match=f"'{name}' cannot honour score_mod"):
            tape_attention(q, k, v, e, score_mod=mod, implementation=name)


# --- Linear biases --------------------------------------------------------------------------------


def biased(q_positions, k_positions, slopes=(0.5, 0.25, 0.1, 0.01)):
    """A `LinearBias`, and what it adds to the scores in float64."""
    distance = np.abs(q_positions[:, None, :, None] - k_positions[:, None, None, :])
    mod = LinearBias(jnp.float32(slopes), jnp.asarray(q_positions), jnp.asarray(k_positions))
    return {"score_mod": mod, "bias": -np.float32(slopes)[:, None, None].astype(float) * distance}


def restarting(n):
    """(segments, positions) of packed documents of uneven lengths, and padding; by row."""
    segments = np.sort(np.random.default_rng(0).integers(-1, 3, (2, n)))
    return segments, np.stack([np.arange(n) - np.searchsorted(row, row) for row in segments])


def index(n):
    """Positions that are indices, for all rows."""
    return np.arange(n)[None]


SEGMENTS, RESTARTING = restarting(70)
OWN = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS >= 0)[:, None]
CACHE = np.array([[500], [3]]), index(1024).repeat(2, 0)
APART = np.random.default_rng(1).integers(0, 99, (2, 120))

BIASED = {
    # A slope below zero raises scores up to 130, whose last bit is 1e-5.
    "by index": (
        inputs(65, 65),
        causal_mask(65),
        biased(index(65), index(65), slopes=(-2.0, 0.5, 0.0, 0.01)) | {"limits": (2e-5, 5e-5)},
    ),
    "one key head": (
        inputs(50, 50, heads=3, kv_heads=1, e_width=8),
        causal_mask(50),
        biased(index(50), index(50), slopes=(1.0, 0.3, 0.0)),
    ),
    "positions apart, not causal": (
        inputs(50, 70),
        np.ones((2, 50, 70), bool),
        biased(APART[:, :50], APART[:, 50:]) | {"causal": False},
    ),
    "documents": (
        inputs(70, 70),
        causal_mask(70) & OWN,
        biased(RESTARTING, RESTARTING) | {"segment_ids": SEGMENTS, "positions": RESTARTING},
    ),
    "a cache": (
        inputs(1, 1024),
        order_mask(*CACHE),
        biased(*CACHE) | {"positions": CACHE},
    ),
}


@pytest.mark.parametrize("case", mostly_slow(BIASED, quick=["by index", "documents", "a cache"]))
def test_linear_bias(attend, case):
    arrays, mask, arguments = BIASED[case]
    if attend.refuses("score_mod", *arrays[:4], score_mod=arguments["score_mod"]):
        return
    check(attend, arrays, mask, **arguments)


def test_linear_bias_without_states_and_its_log_sum_exp(attend):
    q, k, v, e, d_out, d_mixed = inputs(65, 65)
    given = biased(index(65), index(65))
    if attend.refuses("score_mod", q, k, v, score_mod=given["score_mod"]):
        return
    (want, _, want_lse), gradients = truth(
        q, k, v, e, causal_mask(65), 0.25, d_out, 0 * d_mixed, given["bias"]
    )
    bias = given["score_mod"]
    lse = jax.jit(lambda: attend.log_sum_exp(q, k, v, None, scale=0.25, score_mod=bias))()
    assert relative_rms(lse, want_lse) < 2e-6

    def plain(q, k, v, slopes):
        mod = LinearBias(slopes, bias.q_positions, bias.k_positions)
        return attend(q, k, v, score_mod=mod)[0]

    out, pull = jax.vjp(jax.jit(plain), q, k, v, bias.slopes)
    assert relative_rms(out, want) < 2e-6
    *got, d_slopes = pull(jnp.asarray(d_out))
    for ours, theirs in zip(got, gradients, strict=False):
        assert relative_rms(ours, theirs) < 5e-6
    assert (d_slopes == 0.0).all()  # constants


def test_linear_bias_mapped_over_rows(attend):
    """A vmapped call, with positions of each row, gives what one call gives."""
    q, k, v, *_ = map(jnp.asarray, inputs(40, 40))
    positions = jnp.asarray(APART[:, :40])
    bias = LinearBias(jnp.float32([0.5, 0.25, 0.1, 0.01]), positions, positions)
    if attend.refuses("score_mod", q, k, v, score_mod=bias):
        return

    def one(q, k, v, positions):
        mod = LinearBias(bias.slopes, positions[None], positions[None])
        return attend(q[None], k[None], v[None], score_mod=mod)[0][0]

    want = attend(q, k, v, score_mod=bias)[0]
    got = jax.jit(jax.vmap(one))(q, k, v, positions)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"slopes": np.ones(2)}, r"score_mod.slopes must be one for each of 4 query heads.*\(2,\)"),
        ({"q_positions": index(6)}, r"score_mod positions \(query side\) must be \(2 or 1, 5\)"),
        ({"k_positions": np.zeros((3, 5))}, r"score_mod positions \(key side\)"),
    ],
)
def test_a_linear_bias_that_does_not_fit(change, names):
    fitting = {"slopes": np.ones(4), "q_positions": index(5), "k_positions": index(5)}
    with pytest.raises(ValueError, match=names):
        tape_attention(*inputs(5, 5)[:4], score_mod=LinearBias(**fitting | change))
