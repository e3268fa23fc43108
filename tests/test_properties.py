"""The paper's theorems as properties of the code."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tape_attention
from tape_jax import positions
from tape_jax.model import Block
from tape_jax.positions import forms, rotary, tape
from tests.tiny import logits, random_params, run, tiny, tokens

FEW = settings(max_examples=12, deadline=None)
BLOCKS = st.tuples(st.integers(1, 4), st.integers(1, 4))
SEEDS = st.integers(0, 2**31 - 1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def orthogonal(seed, n, reflect):
    """A random orthogonal matrix of determinant -1 (reflect) or +1."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    if (np.linalg.det(q) < 0) != reflect:
        q[:, 0] *= -1
    return jnp.asarray(q, jnp.float32)


def layer(block, q, k, v, e, weights):
    """Eqs. 6 to 8 on general blocks, by the functions the model uses: (out, next state)."""
    _heads, kv_heads, width = q.shape[2], k.shape[2], q.shape[3]
    q = forms.project_blocks(q, e, block)
    k = forms.project_blocks(k, e, block)
    out, mixed = tape_attention(q, k, v, e, scale=width**-0.5)
    e = e + tape.post_mix(mixed, weights["post"], kv_heads)
    return out, e + tape.gated_mix(e, weights["gate"], weights["w1"], weights["w2"])


def layer_inputs(seed, block, kv_heads=2, groups=2, size=3, length=5, width=6):
    rows, columns = block
    batch, heads, d = 2, kv_heads * groups, size * rows
    q, k, v = (
        normal(seed + i, batch, length, h, d) for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    e = normal(seed + 3, batch, length, kv_heads, size * rows * columns)
    weights = {
        "post": 0.3 * normal(seed + 4, kv_heads, heads),
        "gate": normal(seed + 5, batch, length, width),
        "w1": 0.3 * normal(seed + 6, width, kv_heads),
        "w2": 0.3 * normal(seed + 7, kv_heads, width),
    }
    return q, k, v, e, weights


def right_multiply(e, block, matrix):
    blocks = e.reshape(*e.shape[:-1], -1, *block)
    return (blocks @ matrix).reshape(e.shape)


@FEW
@given(seed=SEEDS, block=BLOCKS, reflect=st.booleans())
def test_general_form_is_orthogonally_equivariant(seed, block, reflect):
    """f(X, E Q) = f(X, E) and g(X, E Q) = g(X, E) Q for Q in O(R)."""
    q, k, v, e, weights = layer_inputs(seed, block)
    matrix = orthogonal(seed + 9, block[1], reflect)
    out, state = layer(block, q, k, v, e, weights)
    out_turned, state_turned = layer(block, q, k, v, right_multiply(e, block, matrix), weights)
    chex.assert_trees_all_close(out, out_turned, atol=1e-5)
    chex.assert_trees_all_close(right_multiply(state, block, matrix), state_turned, atol=1e-4)


def test_left_multiplication_is_seen():
    """The counterpart: turning the L axis instead changes the output."""
    block = (2, 2)
    q, k, v, e, weights = layer_inputs(1, block)
    matrix = orthogonal(2, 2, reflect=False)
    blocks = e.reshape(*e.shape[:-1], -1, *block)
    turned = (matrix @ blocks).reshape(e.shape)
    out, _ = layer(block, q, k, v, e, weights)
    assert float(jnp.abs(layer(block, q, k, v, turned, weights)[0] - out).max()) > 0.05


@FEW
@given(seed=SEEDS, groups=st.sampled_from([1, 2, 4]))
def test_complex_form_is_the_general_form(seed, groups):
    z = normal(seed, 2, 5, 2, 8)
    q, k, v, _, weights = layer_inputs(seed, (2, 2), groups=groups, size=4)
    out_complex, mixed = tape_attention(rotary.rotate_heads(q, z), rotary.rotate_heads(k, z), v, z)
    state = z + tape.post_mix(mixed, weights["post"], 2)
    state = state + tape.gated_mix(state, weights["gate"], weights["w1"], weights["w2"])
    out, general = layer((2, 2), q, k, v, forms.rotary_blocks(z), weights)
    chex.assert_trees_all_close(out_complex, out, atol=1e-5)
    chex.assert_trees_all_close(forms.rotary_blocks(state), general, atol=1e-4)


@pytest.mark.parametrize("post", ["full", "scalar"])
def test_models_of_both_forms_agree(post):
    """The same parameters give the same logits in the complex and the general form."""
    fast = tiny(position=positions.Tape(post=post))
    general = tiny(position=positions.Tape(post=post, block=(2, 2)))
    params, ids = random_params(fast, scale=0.2), tokens(fast)
    ours, _, states = run(fast, params, ids)
    theirs, _, blocks = run(general, params, ids)
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(forms.rotary_blocks(states), blocks, atol=1e-4, rtol=1e-3)


def official_rotation(x, cos, sin):
    """q * cos + rotate_half(q) * sin on the duplicated (cos, sin) of width D."""
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], -1) * sin


@FEW
@given(seed=SEEDS)
def test_half_state_is_the_official_duplicated_state(seed):
    """One layer on (cos, sin), each of width D with equal halves, as the official code keeps it."""
    _, k, v, _, weights = layer_inputs(seed, (2, 1), groups=1, size=4)
    q, z = normal(seed + 11, *k.shape), normal(seed + 12, *k.shape)
    a, b = np.split(np.asarray(z), 2, axis=-1)
    cos, sin = np.concatenate([a, a], -1), np.concatenate([b, b], -1)

    out, mixed = tape_attention(rotary.rotate_heads(q, z), rotary.rotate_heads(k, z), v, z)
    scalars = np.asarray(weights["post"]).sum(1)[: k.shape[2]]
    state = z + tape.post_mix(mixed, jnp.asarray(scalars), k.shape[2])
    state = state + tape.gated_mix(state, weights["gate"], weights["w1"], weights["w2"])

    scores = np.einsum(
        "bnhd,bmhd->bhnm",
        official_rotation(np.asarray(q), cos, sin),
        official_rotation(np.asarray(k), cos, sin),
    ) / np.sqrt(k.shape[-1])
    scores = np.where(np.tri(k.shape[1], dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    gate, w1, w2 = (np.asarray(weights[n]) for n in ("gate", "w1", "w2"))
    new = []
    for half in (cos, sin):
        half = half + scalars[:, None] * np.einsum("bhnm,bmhd->bnhd", probs, half)
        new.append(half + np.einsum("hp,bnp,pe,bned->bnhd", w2, gate, w1, half))
        np.testing.assert_array_equal(*np.split(half, 2, axis=-1))
    chex.assert_trees_all_close(out, np.einsum("bhnm,bmhd->bnhd", probs, np.asarray(v)), atol=1e-4)
    for ours, theirs in zip(np.split(np.asarray(state), 2, axis=-1), new, strict=True):
        np.testing.assert_allclose(np.concatenate([ours, ours], -1), theirs, atol=2e-4, rtol=1e-4)


@FEW
@given(seed=SEEDS, kv_heads=st.sampled_from([1, 2, 4]), permutation=st.permutations(range(7)))
def test_a_layer_without_mask_is_permutation_equivariant(seed, kv_heads, permutation):
    config = tiny(num_kv_heads=kv_heads)
    params = jax.tree.map(lambda p: p[0], random_params(config, seed)["layers"])
    x, e = normal(seed, 1, 7, 32), normal(seed + 1, 1, 7, kv_heads, 8)
    order = jnp.asarray(permutation)
    block = Block(config, causal=False)
    where = jnp.arange(7)[None]
    out, state, _ = block.apply({"params": params}, x, e, where, None)
    out_p, state_p, _ = block.apply(
        {"params": params}, x[:, order], e[:, order], where[:, order], None
    )
    chex.assert_trees_all_close(out[:, order], out_p, atol=1e-4)
    chex.assert_trees_all_close(state[:, order], state_p, atol=1e-4)


SHIFT_INVARIANT = {
    "rope": positions.RoPE(),
    "tape": positions.Tape(),
    "official": positions.Tape(post="scalar", zero="w1", gate="hidden"),
    "interpolated": positions.Tape(scaling=positions.LinearScaling(2.0)),
    "blocks 2x2": positions.Tape(block=(2, 2)),
    "blocks 4x2": positions.Tape(block=(4, 2)),
    "blocks 1x4": positions.Tape(block=(1, 4)),
    "blocks 2x4": positions.Tape(block=(2, 4)),
}


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@pytest.mark.parametrize("depth", [1, 6])
def test_logits_are_shift_invariant(name, depth):
    config = tiny(position=SHIFT_INVARIANT[name], num_layers=depth)
    params, ids = random_params(config, scale=0.2), tokens(config)
    base = jnp.arange(ids.shape[1])[None]
    start = logits(config, params, ids, positions=base)
    for shift in (1, 37, 100_000):
        moved = logits(config, params, ids, positions=base + shift)
        np.testing.assert_allclose(moved, start, atol=1e-3 * float(start.std()), rtol=0)
    # Positions do matter: stretched ones give something else.
    stretched = logits(config, params, ids, positions=3 * base)
    assert float(jnp.abs(stretched - start).max()) > 0.05 * float(start.std())


def test_a_frequency_mixing_update_is_not_shift_invariant(monkeypatch):
    """The mutant: the same update with its channels rolled by one frequency."""
    config = tiny()
    params, ids = random_params(config), tokens(config)
    base = jnp.arange(ids.shape[1])[None]
    honest = tape.gated_mix

    def mixing(e, *weights):
        a, b = jnp.split(honest(e, *weights), 2, axis=-1)
        return jnp.concatenate([jnp.roll(a, 1, -1), jnp.roll(b, 1, -1)], -1)

    def spread():
        fresh = run.__wrapped__  # not jitted, so that the mutant is seen
        moved, still = (fresh(config, params, ids, positions=base + s)[0] for s in (5, 0))
        return float(jnp.abs(moved - still).max())

    assert spread() < 1e-3
    monkeypatch.setattr(tape, "gated_mix", mixing)
    assert spread() > 1e-2


@pytest.mark.parametrize("name", ["tape", "rope", "nope"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causality_of_logits_and_states(name, kv_heads):
    config = tiny(position=name, num_kv_heads=kv_heads)
    params, ids = random_params(config), tokens(config)
    changed = ids.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    before, after = run(config, params, ids), run(config, params, changed)
    np.testing.assert_array_equal(before[0][:, :7], after[0][:, :7])
    assert float(jnp.abs(before[0][:, 7:] - after[0][:, 7:]).min()) > 0
    if name == "tape":
        np.testing.assert_array_equal(before[2][:, :, :7], after[2][:, :, :7])
        assert float(jnp.abs(before[2][1:, :, 7:] - after[2][1:, :, 7:]).max()) > 1e-3


def test_causality_does_not_trust_positions():
    """Equal or falling positions must not open a look into the future."""
    config = tiny()
    params, ids = random_params(config), tokens(config)
    changed = ids.copy()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    for where in (jnp.zeros((1, ids.shape[1]), int), jnp.arange(ids.shape[1])[None, ::-1]):
        before = logits(config, params, ids, positions=where)
        after = logits(config, params, changed, positions=where)
        np.testing.assert_array_equal(before[:, :-1], after[:, :-1])


@pytest.mark.parametrize("flavour", [{}, {"post": "scalar", "zero": "w1"}, {"block": (2, 2)}])
def test_a_new_tape_is_rope_exactly(flavour):
    from tape_jax import Transformer

    config = tiny(position=positions.Tape(**flavour), initializer_range=0.3)
    ids = tokens(config)
    params = Transformer(config).init(jax.random.key(3), jnp.asarray(ids))["params"]
    rope = tiny(position=positions.RoPE())
    shared = params | {"layers": dict(params["layers"])}
    learned = shared["layers"].pop("position")
    assert float(jnp.abs(learned["post"]).max()) == 0.0
    nonzero = learned["w1" if flavour.get("zero", "w2") == "w2" else "w2"]
    assert float(jnp.abs(nonzero).max()) > 0.0
    ours, theirs = logits(config, params, ids), logits(rope, shared, ids)
    if "block" in flavour:  # the same numbers in another order of summation
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    else:
        np.testing.assert_array_equal(ours, theirs)


@FEW
@given(
    seed=SEEDS,
    heads=st.integers(1, 6),
    width=st.sampled_from([1, 3, 8, 24]),
    size=st.sampled_from([2, 6, 32]),
)
def test_the_order_of_the_position_mlp_does_not_matter(seed, heads, width, size):
    e, gate = normal(seed, 2, 3, heads, size), normal(seed + 1, 2, 3, width)
    w1, w2 = normal(seed + 2, width, heads), normal(seed + 3, heads, width)
    want = np.einsum(
        "kp,bnp,pj,bnjs->bnks", *(np.asarray(x, np.float64) for x in (w2, gate, w1, e))
    )
    got = tape.gated_mix(e, gate, w1, w2)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max() + 1e-5)


@pytest.mark.parametrize("name", ["tape", "rope", "nope"])
def test_vmap_over_sequences_is_the_batch(name):
    """A model under vmap over single sequences gives what it gives on the batch."""
    config = tiny(position=name, num_kv_heads=2)
    params, ids = random_params(config), jnp.asarray(tokens(config, batch=3))
    where = jnp.arange(ids.shape[1])[None] + jnp.asarray([[0], [5], [9]])
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, ids.shape)))
    batch = run(config, params, ids, positions=where, segment_ids=segments)

    def one(i, w, s):
        outputs = run(config, params, i[None], positions=w[None], segment_ids=s[None])
        return jax.tree.map(lambda x: x, outputs)

    single = jax.vmap(one)(ids, where, segments)
    for whole, parts, axis in zip(batch, single, (0, 1, 1), strict=True):
        if whole is None or (axis == 1 and name == "rope" and whole.ndim == 5):
            continue
        np.testing.assert_allclose(
            np.moveaxis(np.asarray(whole), axis, 0),
            np.asarray(parts).squeeze(axis + 1 if axis else 1),
            atol=1e-5,
        )


PURE = {
    "phases": lambda x: rotary.phases((100 * x[..., 0, 0]).astype(int), rotary.frequencies(8, 1e4)),
    "complex_multiply": lambda x: rotary.complex_multiply(x, jnp.roll(x, 1, -1)),
    "rotate_heads": lambda x: rotary.rotate_heads(x, x[..., :2, :]),
    "rotary_blocks": forms.rotary_blocks,
    "project_blocks": lambda x: forms.project_blocks(x, jnp.tile(x, 2), (2, 2)),
    "post_mix full": lambda x: tape.post_mix(x, normal(1, 2, 4), 2),
    "post_mix scalar": lambda x: tape.post_mix(x, normal(1, 4), 2),
    "gated_mix": lambda x: tape.gated_mix(x, x[..., 0, :], normal(1, 8, 4), normal(2, 4, 8)),
    "tape_attention": lambda x: tape_attention(x, x[..., :2, :], x[..., 2:, :], x[..., :2, :])[1],
}


@pytest.mark.parametrize("name", PURE)
def test_pure_functions_under_vmap(name):
    x = normal(0, 3, 5, 4, 8)
    whole = PURE[name](x)
    parts = jax.vmap(lambda row: PURE[name](row[None])[0])(x)
    chex.assert_trees_all_close(whole, parts, atol=1e-6)
