"""Logits of each encoding against its formula written out in float64, one pair of tokens a time."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import probabilities
from tape_jax import positions
from tape_jax.positions.additive import alibi_slopes, t5_buckets
from tests.tiny import tiny

D, H, K, N = 8, 4, 2, 14
WHERE = np.concatenate([np.arange(5), 3 * np.arange(9) + 40])  # gaps, and far enough for buckets


class Logits(nn.Module):
    """What the hooks of an encoding make of q and k, (1, H, N, N)."""

    config: object

    @nn.compact
    def __call__(self, q, k, where):
        encoding = self.config.position
        state = encoding.initial_state(where, self.config)
        q, k = encoding.rotate(q, k, state, where, self.config)
        probs, lse = probabilities(
            q,
            k,
            causal=True,
            order=None,
            segment_ids=None,
            scale=D**-0.5,
            score_mod=encoding.score_mod(q, where, where, self.config),
        )
        return jnp.log(probs) + lse.swapaxes(1, 2)[..., None]


def measured(encoding, seed=0, spread=0.7):
    """(q, k, learned, logits) in float64, the parameters drawn anew."""
    config = tiny(position=encoding, num_heads=H, num_kv_heads=K, hidden_size=D * H)
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.normal(size=(1, N, heads, D)), jnp.float32) for heads in (H, K))
    where = jnp.asarray(WHERE)[None]
    module = Logits(config)
    learned = module.init(jax.random.key(0), q, k, where)
    learned = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(0, spread, p.shape), "float32"), learned
    )
    logits = jax.jit(module.apply)(learned, q, k, where)
    double = lambda x: np.asarray(x, np.float64)  # noqa: E731
    learned = jax.tree.map(double, learned).get("params", {}).get("position", {})
    return double(q)[0], double(k)[0], learned, double(logits)[0]


def check(encoding, formula, atol=2e-5):
    """formula(q_i, k_j, i, j, h, learned) -> the logit of one pair, positions i and j."""
    q, k, learned, logits = measured(encoding)
    for h, a in np.ndindex(H, N):
        for b in range(a + 1):
            want = formula(q[a, h], k[b, h // (H // K)], WHERE[a], WHERE[b], h, learned)
            assert abs(logits[h, a, b] - want) < atol * max(1, abs(want)), (h, a, b, want)
    spread = [formula(q[9, 0], k[b, 0], WHERE[9], WHERE[b], 0, learned) for b in range(9)]
    assert np.std(spread) > 1e-2


def dot(q, k):
    return q @ k / math.sqrt(D)


def rotated(q, k, i, j, w):
    """RoPE's logit at these frequencies."""
    z = np.exp(1j * (j - i) * w)
    a, b = q[: D // 2] + 1j * q[D // 2 :], k[: D // 2] + 1j * k[D // 2 :]
    return (np.conj(a) * z * b).real.sum() / math.sqrt(D)


def softplus(x):
    return np.log1p(np.exp(x))


W = 10_000.0 ** (-2 * np.arange(D // 2) / D)


def test_position_interpolation():
    encoding = positions.RoPE(scaling=positions.LinearScaling(4.0))
    check(encoding, lambda q, k, i, j, h, _: rotated(q, k, i / 4, j / 4, W))


def test_ntk_raises_the_base():
    base = 10_000.0 * 4.0 ** (D / (D - 2))
    w = base ** (-2 * np.arange(D // 2) / D)
    encoding = positions.RoPE(scaling=positions.NTKScaling(4.0))
    check(encoding, lambda q, k, i, j, h, _: rotated(q, k, i, j, w))


@pytest.mark.parametrize("original", [5, 100])
def test_dynamic_ntk_by_the_length_of_the_call(original):
    scale = 3 * N / original - 2 if original < N else 1.0
    w = (10_000.0 * scale ** (D / (D - 2))) ** (-2 * np.arange(D // 2) / D)
    encoding = positions.RoPE(scaling=positions.DynamicNTKScaling(3.0, original))
    check(encoding, lambda q, k, i, j, h, _: rotated(q, k, i, j, w))


def test_llama3_scaling():
    """The published rule by wavelength, on frequencies of all three kinds."""
    scale, low, high, original, base = 8.0, 1.0, 4.0, 100, 50.0
    plain = base ** (-2 * np.arange(D // 2) / D)
    w, kinds = [], set()
    for omega in plain:
        wavelength = 2 * math.pi / omega
        if wavelength < original / high:
            w.append(omega), kinds.add("kept")
        elif wavelength > original / low:
            w.append(omega / scale), kinds.add("slowed")
        else:
            u = (original / wavelength - low) / (high - low)
            w.append((1 - u) * omega / scale + u * omega), kinds.add("blended")
    encoding = positions.RoPE(
        base=base, scaling=positions.Llama3Scaling(scale, original, low, high)
    )
    check(encoding, lambda q, k, i, j, h, _: rotated(q, k, i, j, np.array(w)))
    assert kinds == {"kept", "blended", "slowed"}


@pytest.mark.parametrize("ramp", ["index", "rotations"])
def test_yarn_with_its_temperature(ramp):
    """Equations 17 and 18 of the paper; the code's ramp in the index of the frequency."""
    scale, original, base = 4.0, 1000, 10_000.0
    if ramp == "rotations":
        kept = np.clip((original * W / (2 * math.pi) - 1) / 31, 0, 1)
    else:
        place = lambda r: D * math.log(original / (r * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
        low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), D - 1)
        kept = 1 - np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    w = W / scale * (1 - kept) + W * kept
    m = 0.1 * math.log(scale) + 1
    encoding = positions.RoPE(scaling=positions.YarnScaling(scale, original, ramp=ramp))
    check(encoding, lambda q, k, i, j, h, _: m**2 * rotated(q, k, i, j, w))
    assert kept.min() + kept.max() > 0 and len(set(kept)) > 1


def test_dynamic_yarn_follows_the_length():
    short = positions.DynamicYarnScaling(4.0, 100)
    np.testing.assert_array_equal(short.frequencies(W, 1e4, 100), W)
    assert short.magnitude(100) == pytest.approx(0.1 * math.log(4) + 1)
    fixed = positions.YarnScaling(2.5, 100, ramp="rotations")
    np.testing.assert_allclose(short.frequencies(W, 1e4, 250), fixed.frequencies(W, 1e4, 1))
    assert short.magnitude(250) == pytest.approx(fixed.magnitude(1))


def test_xpos():
    zeta = (2 * np.arange(D // 2) + 0.4 * D) / (1.4 * D)

    def formula(q, k, i, j, h, _):
        power = np.tile(zeta ** ((i - j) / 512), 2)
        return rotated(q * power, k, i, j, W)

    check(positions.XPos(), formula)
    check(positions.XPos(center=30), formula)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20])
def test_alibi_slopes(heads):
    """Of twelve heads: eight of 8, then every other one of 16."""
    below = 2 ** int(math.log2(heads))
    want = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    want += [2 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * (heads - below), 2)]
    np.testing.assert_allclose(alibi_slopes(heads), want, rtol=1e-6)
    assert len(alibi_slopes(heads)) == heads
    if heads == 12:
        np.testing.assert_allclose(alibi_slopes(12)[8:], 2.0 ** -np.array([0.5, 1.5, 2.5, 3.5]))


def test_alibi():
    check(positions.ALiBi(), lambda q, k, i, j, h, _: dot(q, k) - 2.0 ** (-2 * (h + 1)) * (i - j))


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (64, 128), (8, 16)])
def test_t5_buckets(buckets, most):
    exact = buckets // 2
    got = t5_buckets(buckets, most)
    assert list(got[:exact]) == list(range(exact)) and got[most] == buckets - 1
    assert (np.diff(got) >= 0).all()
    for d in range(exact, most):
        place = exact + math.log(d / exact) / math.log(most / exact) * (buckets - exact)
        if abs(place - round(place)) > 1e-4:  # borders are float32's to decide
            assert got[d] == min(math.floor(place), buckets - 1)


def test_t5():
    buckets = t5_buckets(8, 16)

    def formula(q, k, i, j, h, learned):
        return dot(q, k) + learned["table"][buckets[min(i - j, 16)], h]

    check(positions.T5(buckets=8, max_distance=16), formula)


def test_kerple():
    def formula(q, k, i, j, h, learned):
        p, a = softplus(learned["p"][h]), softplus(learned["a"][h])
        return dot(q, k) - p * math.log(1 + a * (i - j))

    check(positions.Kerple(), formula)


def fire(i, j, h, learned, threshold, epsilon):
    psi = lambda x: math.log(abs(learned["c"] * x) + 1)  # noqa: E731
    longest = max(i, abs(learned["multiplier"] * threshold))
    x = psi(i - j) / (psi(longest) + epsilon)
    hidden = np.maximum(learned["w1"] * x + learned["bias1"], 0)
    return hidden @ learned["w2"][:, h] + learned["bias2"][h]


@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
def test_fire(epsilon):
    encoding = positions.Fire(threshold=20.0, epsilon=epsilon)
    check(
        encoding,
        lambda q, k, i, j, h, learned: dot(q, k) + fire(i, j, h, learned, 20.0, epsilon),
    )


@pytest.mark.parametrize("inner", ["alibi", "kerple", "fire"])
def test_dape(inner):
    """Needs the logits of all heads at once, so the loop of `check` is written out."""
    encoding = positions.Dape(inner=positions.get(inner), width=5)
    q, k, learned, logits = measured(encoding)
    own = learned.get("position", {})

    def bias(i, j, h):
        if inner == "alibi":
            return -(2.0 ** (-2 * (h + 1))) * (i - j)
        if inner == "kerple":
            return -softplus(own["p"][h]) * math.log(1 + softplus(own["a"][h]) * (i - j))
        return fire(i, j, h, own, 512.0, 1e-6)

    for a in range(N):
        for b in range(a + 1):
            scores = np.array([dot(q[a, h], k[b, h // 2]) for h in range(H)])
            biases = np.array([bias(WHERE[a], WHERE[b], h) for h in range(H)])
            hidden = np.concatenate([scores, biases]) @ learned["w1"] + learned["bias1"]
            hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
            want = scores + biases + hidden @ learned["w2"] + learned["bias2"]
            np.testing.assert_allclose(logits[:, a, b], want, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("count", [3, 64])
def test_cope(count):
    """Row by row: gates, their sums from the query back, interpolation."""
    q, k, learned, logits = measured(positions.CoPE(count=count))
    embedding, clamped = learned["embedding"], 0
    for h in range(H):
        for a in range(N):
            scores = [dot(q[a, h], k[b, h // 2]) for b in range(a + 1)]
            gates = [1 / (1 + math.exp(-s)) for s in scores]
            for b in range(a + 1):
                p = min(sum(gates[b:]), count - 1)
                clamped += p == count - 1
                low, high = math.floor(p), math.ceil(p)
                z = [q[a, h] @ embedding[:, place] for place in (low, high)]
                want = scores[b] + z[1] * (p - low) + z[0] * (1 - (p - low))
                assert abs(logits[h, a, b] - want) < 5e-5 * max(1, abs(want))
    assert bool(clamped) == (count == 3)


def test_tapa_quadratic():
    def formula(q, k, i, j, h, _):
        half = D // 2
        phi = q[half:] @ k[half:] / math.sqrt(half)
        return q[:half] @ k[:half] / math.sqrt(half) * math.cos(2 * math.pi * (i - j) ** 0.1 * phi)

    check(positions.TAPA(), formula, atol=1e-4)


def test_tapa_linear_with_other_shares():
    def formula(q, k, i, j, h, _):
        a, p = 6, 2
        phi = (q[a:].sum() + k[a:].sum()) / math.sqrt(p)
        return q[:a] @ k[:a] / math.sqrt(a) * math.cos(2 * math.pi * (i - j) ** 0.3 * phi)

    check(positions.TAPA(phase="linear", alpha=0.3, theta=0.75), formula, atol=1e-4)


@pytest.mark.parametrize("offsets", [True, False])
def test_pope(offsets):
    w = 10_000.0 ** (-np.arange(D) / D)

    def formula(q, k, i, j, h, learned):
        delta = learned["offset"][h] if offsets else 0.0
        return (softplus(q) * softplus(k) * np.cos((j - i) * w + delta)).sum() / math.sqrt(D)

    check(positions.PoPE(offsets=offsets), formula)


def test_fourier_start_estimates_a_gaussian_kernel():
    """The mean of cos(w d) over many frequencies is exp(-d^2 / 2 l^2)."""
    config = tiny(head_dim=8192, position=positions.Tape(start=positions.Fourier(5.0)))
    where = jnp.asarray([[0, 1, 3, 6, 10, 15, 40]])
    z = np.asarray(config.position.initial_state(where, config))[0, :, 0]
    gram = z @ z.T / (8192 / 2)
    distance = np.asarray(where)[0][:, None] - np.asarray(where)[0]
    np.testing.assert_allclose(gram, np.exp(-(distance**2) / (2 * 25)), atol=0.05)
    np.testing.assert_allclose(np.diag(gram), 1, atol=1e-5)
