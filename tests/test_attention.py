"""Every implementation of position-aware attention against float64 by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, tape_attention, tiles
from pallas_kernels.reference import LOWEST
from pallas_kernels.tiles import Tile, Tiles
from tests.kernels_on_cpu import run_on_cpu
from tests.tiny import mostly_slow

LENGTHS = mostly_slow([1, 7, 16, 63, 65, 128, 200], quick=[1, 65])
WIDTHS = mostly_slow([16, 32, 48, 64, 72, 80, 96, 128], quick=[48, 128])

REFUSED = {
    "score_mod": {"triton", "cudnn", "tpu"},
    "score_mod of kind ScoreMod": {"pallas"},
    "positions": {"cudnn", "tpu"},
    "segment_ids": {"cudnn"},
    "dtype float16": {"tpu"},
}
"""What an implementation says it cannot honour, by what the error must name."""


@dataclasses.dataclass(frozen=True)
class Attend:
    """`tape_attention` by one implementation."""

    name: str

    def __call__(self, *arrays, **arguments):
        return tape_attention(*arrays, implementation=self.name, **arguments)

    def log_sum_exp(self, *arrays, **arguments):
        normal = {"causal": True, "order": None, "segment_ids": None, "score_mod": None} | arguments
        return IMPLEMENTATIONS[self.name].attend(*arrays, **normal)[2]

    def refuses(self, argument, *arrays, **arguments):
        """Whether it refuses the call as it should, naming the argument."""
        if self.name not in REFUSED[argument]:
            return False
        with pytest.raises(ValueError, match=f"{self.name}' cannot honour {argument}"):
            self(*arrays, **arguments)
        return True


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request, monkeypatch):
    """The implementation under test, on the CPU, with tiles small enough to need several."""
    run_on_cpu(request.param, monkeypatch)
    return Attend(request.param)


def truth(q, k, v, e, mask, scale, d_out, d_mixed, bias=0.0):
    """(out, mixed, log-sum-exp) and gradients of <out, d_out> + <mixed, d_mixed>, in float64."""
    q, k, v, e, d_out, d_mixed = (np.asarray(x, np.float64) for x in (q, k, v, e, d_out, d_mixed))
    groups = q.shape[2] // k.shape[2]
    k_all, v_all, e_all = (np.repeat(x, groups, axis=2) for x in (k, v, e))
    scores = scale * np.einsum("bnhd,bmhd->bhnm", q, k_all) + bias
    scores = np.where(mask[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    probs = weights / np.where(total == 0, 1, total)
    outs = [np.einsum("bhnm,bmhd->bnhd", probs, x) for x in (v_all, e_all)]
    with np.errstate(divide="ignore"):
        lse = np.maximum(np.log(total) + top, LOWEST)[..., 0].swapaxes(1, 2)
    d_probs = np.einsum("bnhd,bmhd->bhnm", d_out, v_all)
    d_probs += np.einsum("bnhd,bmhd->bhnm", d_mixed, e_all)
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdims=True))

    def group_sum(x):
        return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)

    gradients = [
        scale * np.einsum("bhnm,bmhd->bnhd", d_scores, k_all),
        group_sum(scale * np.einsum("bhnm,bnhd->bmhd", d_scores, q)),
        group_sum(np.einsum("bhnm,bnhd->bmhd", probs, d_out)),
        group_sum(np.einsum("bhnm,bnhd->bmhd", probs, d_mixed)),
    ]
    return (*outs, lse), gradients


def inputs(n_q, n_k, heads=4, kv_heads=2, width=16, e_width=16, batch=2, seed=0):
    """q, k, v, e and the two cotangents."""
    rng = np.random.default_rng(seed)
    shapes = [(n_q, heads, width), *[(n_k, kv_heads, w) for w in (width, width, e_width)]]
    shapes += [(n_q, heads, width), (n_q, heads, e_width)]
    return [rng.normal(size=(batch, *shape)).astype(np.float32) for shape in shapes]


def relative_rms(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    return np.sqrt(((got - want) ** 2).mean() / ((want**2).mean() + 1e-30))


def check(attend, arrays, mask, dtype=jnp.float32, limits=(2e-6, 5e-6), bias=0.0, **arguments):
    """Values and gradients of one call against the truth on the same (rounded) inputs."""
    q, k, v, e, d_out, d_mixed = (jnp.asarray(x, dtype) for x in arrays)
    scale = arguments.get("scale") or q.shape[-1] ** -0.5
    want, want_grads = truth(q, k, v, e, mask, scale, d_out, d_mixed, bias)

    @jax.jit
    def both(q, k, v, e):
        out, pull = jax.vjp(lambda *a: attend(*a, **arguments), q, k, v, e)
        return out, pull((d_out, d_mixed))

    got, got_grads = both(q, k, v, e)
    for ours, theirs in zip(got, want[:2], strict=True):
        assert ours.dtype == dtype
        assert relative_rms(ours, theirs) < limits[0]
    for ours, theirs in zip(got_grads, want_grads, strict=True):
        # A single key has constant probabilities: the true gradient of q and k is exactly 0.
        if np.abs(theirs).max() < 1e-12:
            np.testing.assert_allclose(np.asarray(ours, np.float64), 0.0, atol=limits[1])
        else:
            assert relative_rms(ours, theirs) < limits[1]
    again = both(q, k, v, e)
    jax.tree.map(np.testing.assert_array_equal, (got, got_grads), again)
    return got


def order_mask(q_order, k_order):
    return np.asarray(q_order)[:, :, None] >= np.asarray(k_order)[:, None, :]


def causal_mask(n, batch=2):
    return np.broadcast_to(np.tri(n, dtype=bool), (batch, n, n))


@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(attend, n):
    check(attend, inputs(n, n), causal_mask(n))


@pytest.mark.parametrize("n", mostly_slow([7, 65, 200], quick=[65]))
def test_lengths_without_causality(attend, n):
    check(attend, inputs(n, n), np.ones((2, n, n), bool), causal=False)


@pytest.mark.parametrize("width", WIDTHS)
def test_widths(attend, width):
    check(attend, inputs(40, 40, width=width, e_width=width), causal_mask(40))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), mostly_slow([(4, 4), (3, 1), (8, 2)], quick=[(3, 1)])
)
def test_grouped_queries(attend, heads, kv_heads):
    check(attend, inputs(50, 50, heads=heads, kv_heads=kv_heads, e_width=8), causal_mask(50))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(attend, dtype):
    arrays = inputs(65, 65)
    if dtype == jnp.float16 and attend.refuses(
        "dtype float16", *(jnp.asarray(x, dtype) for x in arrays[:4])
    ):
        return
    check(attend, arrays, causal_mask(65), dtype, limits=(5e-3, 1e-2))


def test_segments_padding_and_empty_rows(attend):
    segments = np.sort(np.random.default_rng(0).integers(-1, 3, (2, 70)))
    same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    arrays = inputs(70, 70)
    if attend.refuses("segment_ids", *arrays[:4], segment_ids=segments):
        return
    got = check(attend, arrays, causal_mask(70) & same, segment_ids=segments, scale=0.25)
    for out in got:
        assert (np.asarray(out)[segments < 0] == 0.0).all()


def test_cross_lengths_with_pairs_of_positions_and_segments(attend):
    rng = np.random.default_rng(0)
    q_order, k_order = rng.integers(-1, 40, (2, 5)), rng.permutation(40)[None].repeat(2, 0)
    q_order[:, 2] = -1  # before every key
    q_seg, k_seg = np.zeros((2, 5), int), rng.integers(0, 2, (2, 40))
    mask = order_mask(q_order, k_order) & (q_seg[:, :, None] == k_seg[:, None, :])
    arrays, pairs = inputs(5, 40), {"positions": (q_order, k_order), "segment_ids": (q_seg, k_seg)}
    if attend.refuses("positions", *arrays[:4], **pairs):
        return
    got = check(attend, arrays, mask, **pairs)
    assert (np.asarray(got[0])[:, 2] == 0.0).all()


def test_one_query_against_a_cache(attend):
    """Short and long caches, filled in part and differently by row, with grouped queries."""
    for length in (90, 1024):
        order = (np.array([[length // 2], [3]]), np.arange(length)[None].repeat(2, 0))
        arrays = inputs(1, length)
        if attend.refuses("positions", *arrays[:4], positions=order):
            return
        check(attend, arrays, order_mask(*order), positions=order)


def test_without_states_it_is_plain_attention(attend):
    q, k, v, e, *_ = inputs(37, 37)
    out, mixed = attend(q, k, v)
    assert mixed is None
    np.testing.assert_allclose(out, attend(q, k, v, e)[0], atol=1e-6)


def test_log_sum_exp_and_its_gradient(attend):
    """Against float64, empty rows included; d lse / d q is scale * P k, and so for k."""
    q, k, v, e, _, _ = inputs(70, 70, width=16)
    segments = np.sort(np.random.default_rng(1).integers(-1, 2, (2, 70)))
    same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    none = np.zeros((2, 70, 4, 16))
    for mask, pair in (
        (causal_mask(70), None),
        (causal_mask(70) & same, (jnp.asarray(segments), jnp.asarray(segments))),
    ):
        if pair and attend.name in REFUSED["segment_ids"]:
            continue

        def lse(q, k, pair=pair):
            return attend.log_sum_exp(q, k, v, e, segment_ids=pair, scale=0.25)

        got = jax.jit(lse)(q, k)
        if attend.name in ("cudnn", "tpu"):  # their libraries keep it
            assert got is None
            continue
        (_, _, want), _ = truth(q, k, v, e, mask, 0.25, none, none)
        assert got.shape == want.shape == (2, 70, 4) and got.dtype == jnp.float32
        empty = want == LOWEST
        assert (empty == ~mask.any(-1)[..., None]).all()
        np.testing.assert_array_equal(np.asarray(got)[empty], np.float32(LOWEST))
        assert relative_rms(np.asarray(got)[~empty], want[~empty]) < 2e-6

        weight = np.random.default_rng(2).normal(size=want.shape) * ~empty
        loss = lambda q, k, w=weight: (lse(q, k) * w).sum()  # noqa: E731
        dq, dk = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k)
        # <P k, w> as an attention that mixes k, and its transpose.
        (pk, *_), _ = truth(q, k, k, e, mask, 0.25, none, none)
        assert relative_rms(dq, 0.25 * weight[..., None] * pk) < 5e-6
        _, (_, _, want_dk, _) = truth(q, k, k, e, mask, 0.25, weight[..., None] * q, none)
        assert relative_rms(dk, 0.25 * want_dk) < 5e-6


def test_transformations(attend):
    """jit, vmap, grad of checkpoint, and scan give what the plain call gives."""
    q, k, v, e, d_out, _ = map(jnp.asarray, inputs(40, 40))
    one = lambda *row: attend(*(x[None] for x in row))  # noqa: E731
    scan = lambda *rows: jax.lax.scan(lambda c, row: (c, one(*row)), 0, rows)[1]  # noqa: E731
    plain = attend(q, k, v, e)
    jitted = jax.jit(attend)(q, k, v, e)
    by_row = [jax.jit(f)(q, k, v, e) for f in (jax.vmap(one), scan)]
    for other in (jitted, *([x[:, 0] for x in rows] for rows in by_row)):
        for a, b in zip(plain, other, strict=True):
            np.testing.assert_allclose(b, a, atol=2e-6)

    def gradients(function):
        loss = lambda *a: (function(*a)[0] * d_out).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, e)

    for a, b in zip(gradients(attend), gradients(jax.checkpoint(attend)), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5)


@pytest.mark.slow
def test_a_thousand(attend, monkeypatch):
    large = Tile(128, 64, 4, 1)
    monkeypatch.setattr(tiles, "choose", lambda *_: Tiles(large, large, large))
    check(attend, inputs(1000, 1000, batch=1), causal_mask(1000, 1))


def memory(implementation, n):
    """Bytes of temporaries of forward and backward."""
    shapes = [jax.ShapeDtypeStruct((1, n, 4, 64), jnp.float32)] * 4

    def loss(q, k, v, e):
        out, mixed = tape_attention(q, k, v, e, implementation=implementation)
        return (out**2).sum() + (mixed**2).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_the_tiled_path_is_linear():
    short, long = memory("xla", 2048), memory("xla", 8192)
    assert long <= 4.5 * short
    assert long < memory("reference", 8192) / 10


def test_the_forward_is_not_repeated_when_its_outputs_are_kept():
    """Exponentials of score tiles in the gradient: kept outputs leave the backward's only."""
    arrays = [jnp.asarray(x) for x in inputs(64, 64)[:4]]
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def forwards(policy):
        def loss(*a):
            return (tape_attention(*a, implementation="xla")[0] ** 2).sum()

        # With the value asked for too, the forward pass itself is needed once.
        grad = jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2, 3))
        text = jax.jit(grad).lower(*arrays).as_text()
        return text.count("exponential") - text.count("exponential_minus_one")

    once, twice = forwards(policy), forwards(jax.checkpoint_policies.nothing_saveable)
    assert 0 < once < twice


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": (2, 5, 8)}, "q must be"),
        ({"k": (2, 5, 2, 4)}, "q .* and k"),
        ({"v": (2, 4, 2, 8)}, "v .* and k"),
        ({"e": (2, 5, 1, 8)}, "e .* and k"),
        ({"q": (2, 5, 3, 8)}, "query heads"),
        ({"q": (2, 0, 4, 8)}, "q .* is empty"),
        ({"segment_ids": (2, 6)}, "segment_ids"),
        ({"segment_ids": (3, 5)}, r"segment_ids \(query side\) must be \(2 or 1, 5\)"),
        ({"positions": (5,)}, "positions"),
        ({"implementation": "referenc"}, "implementation='referenc' is unknown"),
    ],
)
def test_arguments_that_do_not_fit(change, names):
    shapes = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8), "e": (2, 5, 2, 8)}
    arguments = {
        name: np.zeros(value, int if "s" in name else np.float32)
        if isinstance(value, tuple)
        else value
        for name, value in (shapes | change).items()
    }
    with pytest.raises(ValueError, match=names):
        tape_attention(**arguments)


@pytest.mark.parametrize("name", ["k", "v", "e"])
def test_dtypes_that_do_not_fit(name):
    arrays = {x: jnp.zeros((1, 4, 2, 8), jnp.float32) for x in ("q", "k", "v", "e")}
    arrays[name] = arrays[name].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{name} is bfloat16 and q float32: cast them"):
        tape_attention(**arrays)
