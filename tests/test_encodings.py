"""What must hold for every encoding, whatever its formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chunked
from tape_jax import positions
from tape_jax.positions.additive import distances
from tape_jax.positions.randomized import ordered_draw
from tape_jax.positions.rotary import RoPE, rotate_heads
from tests.tiny import logits, mostly_slow, random_params, run, tiny, tokens

SCALED = {
    "rope-linear": RoPE(scaling=positions.LinearScaling(4.0)),
    "rope-ntk": RoPE(scaling=positions.NTKScaling(4.0)),
    "rope-dynamic": RoPE(scaling=positions.DynamicNTKScaling(2.0, 8)),
    "rope-yarn": RoPE(scaling=positions.YarnScaling(4.0, 64)),
    "rope-llama3": RoPE(scaling=positions.Llama3Scaling(8.0, 64)),
    "tape-yarn": positions.Tape(scaling=positions.YarnScaling(4.0, 64), unit=True),
    "tape-dynamic-yarn": positions.Tape(scaling=positions.DynamicYarnScaling(4.0, 8)),
    "tape-blocks-unit": positions.Tape(block=(2, 4), unit=True),
    "tape-vectorial-full": positions.Tape(mixing="channels", post="full"),
    "randomized-tape": positions.Randomized(inner=positions.Tape()),
}
EVERY = {name: positions.get(name) for name in (*positions.names(), *positions.VARIANTS)} | SCALED
ABSOLUTE = {"sinusoidal", "fire", "dape", "tape-learned"}  # FIRE and what is built on it: by query
NOT_EQUIVARIANT = {"tape-separate", "tape-vectorial", "tape-nonequivariant", "tape-vectorial-full"}
QUICK = ["rope", "alibi", "cope", "tapa", "pope", "tape", "tape-unit", "tape-nonequivariant"]
LENGTH = 12


@functools.cache
def model(name, kv_heads=2):
    config = tiny(position=EVERY[name], num_kv_heads=kv_heads, num_layers=2, scan_layers=False)
    # TAPA's phases turn 2 pi times a product of queries and keys: at the others' scale its logits
    # are many turns, and rounding in their inputs is no longer small in the cosine.
    return config, random_params(config, scale=0.12 if name.startswith("tapa") else 0.25)


def everything(name, ids, where=None, segments=None):
    """Logits and states (or zeros) of a (2, 12) batch; one program for all questions."""
    config, params = model(name)
    where = np.arange(LENGTH)[None] if where is None else where
    segments = np.zeros((1, LENGTH), int) if segments is None else segments
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (2, LENGTH))  # noqa: E731
    out, _, states = run(
        config, params, jnp.asarray(ids), positions=spread(where), segment_ids=spread(segments)
    )
    return np.asarray(out), np.zeros((1, 1, LENGTH)) if states is None else np.asarray(states)


@pytest.mark.parametrize("name", mostly_slow(EVERY, QUICK))
def test_no_encoding_sees_the_future_or_another_document(name):
    ids = tokens(model(name)[0])
    out, states = everything(name, ids)
    assert np.isfinite(out).all() and np.isfinite(states).all()

    changed = ids.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    later, later_states = everything(name, changed)
    np.testing.assert_array_equal(out[:, :7], later[:, :7])
    np.testing.assert_array_equal(states[:, :, :7], later_states[:, :, :7])
    assert np.abs(out[:, 7:] - later[:, 7:]).max() > 1e-3

    # Documents of 7 and 5 tokens in a row, positions restarting.
    where = np.r_[0:7, 0:5][None]
    segments = np.repeat([0, 1], [7, 5])[None]
    packed, packed_states = everything(name, ids, where, segments)
    other = ids.copy()
    other[:, :7] = (other[:, :7] + 1) % 31
    beside, beside_states = everything(name, other, where, segments)
    np.testing.assert_array_equal(packed[:, 7:], beside[:, 7:])
    np.testing.assert_array_equal(packed_states[:, :, 7:], beside_states[:, :, 7:])
    # The second document by itself, followed by padding.
    alone = np.concatenate([ids[:, 7:], ids[:, :7]], axis=1)
    apart, apart_states = everything(
        name, alone, np.r_[0:5, 0:7][None], np.repeat([0, -1], [5, 7])[None]
    )
    np.testing.assert_allclose(packed[:, 7:], apart[:, :5], atol=2e-5)
    np.testing.assert_allclose(packed_states[:, :, 7:], apart_states[:, :, :5], atol=2e-5)


@pytest.mark.parametrize("name", mostly_slow(EVERY, QUICK))
def test_relative_encodings_are_shift_invariant_and_absolute_ones_are_not(name):
    ids, shift = tokens(model(name)[0]), 900
    base = np.arange(LENGTH)[None]
    start, moved = (everything(name, ids, base + s)[0] for s in (0, shift))
    change = np.abs(moved - start).max() / start.std()
    if name in ABSOLUTE | NOT_EQUIVARIANT:
        assert change > 1e-2
    else:
        assert change < 1e-3
    # Distances matter, but where content counts them or nobody does.
    stretched = everything(name, ids, 3 * base)[0]
    if name not in ("nope", "cope"):
        assert np.abs(stretched - start).max() > 1e-2 * start.std()


def moves_no_softmax(path):
    """The last bias of an MLP adds the same to all scores of a row: only rounding moves it."""
    return path[-1].key == "bias2"


TILED = ["alibi", "t5", "fire", "dape-kerple", "tapa-linear", "pope", "xpos"]
TILED += ["tape-unit", "tape-separate", "tape-vectorial", "tape-nonequivariant"]


@pytest.mark.parametrize("name", mostly_slow(TILED, quick=["fire"]))
def test_tiles_scans_and_rematerialisation_change_no_gradient(name, monkeypatch):
    """Linear memory, several ragged tiles, grouped queries, packed rows with their positions."""
    for side in ("BLOCK_Q", "BLOCK_K"):
        monkeypatch.setattr(chunked, side, 5)
    config, params = model(name)
    ids = jnp.asarray(tokens(config))
    where = jnp.asarray(np.stack([np.r_[0:7, 0:5], np.r_[3:15]]))
    segments = jnp.asarray(np.stack([np.repeat([0, 1], [7, 5]), np.repeat([0, -1], [9, 3])]))

    def gradients(**fields):
        changed = dataclasses.replace(config, **fields)

        def loss(params):
            out = logits(changed, params, ids, positions=where, segment_ids=segments)
            real = jnp.where(segments[..., None] >= 0, out, 0.0)
            return (real**2).mean()

        return jax.jit(jax.grad(loss))(params)

    plain = gradients(attention="reference")
    tiled = gradients(attention="xla", scan_layers=True, remat="full")
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(plain))
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(tiled), strict=True
    ):
        if moves_no_softmax(path):
            assert max(float(jnp.abs(g).max()) for g in (got, want)) < 1e-6 * largest, path
            continue
        size = max(float(jnp.abs(want).max()), 1e-3 * largest)
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * size, err_msg=str(path))
    learned = plain["layers"].get("position") or plain["layers"]["attention"].get("position", {})
    for path, gradient in jax.tree_util.tree_leaves_with_path(learned):
        if not moves_no_softmax(path):
            assert float(jnp.abs(gradient).max()) > 1e-5 * largest, path


@pytest.mark.parametrize(
    "name", mostly_slow([*positions.names(), "tape-unit", "tape-yarn"], quick=["tape", "tapa"])
)
def test_bfloat16_stays_close(name):
    """The compute dtype changes rounding only: angles, biases and phases are float32."""
    config, params = model(name)
    low = dataclasses.replace(config, dtype="bfloat16")
    ids = tokens(config)
    want, got = logits(config, params, ids), logits(low, params, ids)
    assert got.dtype == jnp.float32
    error = jnp.sqrt(jnp.mean((got - want) ** 2)) / want.std()
    assert float(error) < 0.06


@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["alibi", "fire", "cope", "dape", "tapa", "tape-nonequivariant"])
def test_on_a_mesh_the_numbers_are_the_same(name):
    from train.mesh import MeshConfig, make_mesh

    config, params = model(name)
    ids = tokens(config, batch=4)
    alone = logits(config, params, ids)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        spread = jax.jit(functools.partial(logits.__wrapped__, config))(params, ids)
    np.testing.assert_allclose(spread, alone, atol=2e-5)


# --- Far positions --------------------------------------------------------------------------------

FAR = np.array([0, 1, 4095, 65_535, 131_071])


@pytest.mark.parametrize("scaling", positions.SCALINGS)
def test_scaled_phases_at_far_positions(scaling):
    """Within 1e-3 of float64, and neighbours differ, also as bfloat16 computes with them."""
    kinds = {"factor": 8.0, "original": 8192}
    kind = positions.SCALINGS[scaling]
    fields = {f.name: kinds[f.name] for f in dataclasses.fields(kind) if f.name in kinds}
    encoding = RoPE(base=500_000.0, scaling=kind(**fields))
    freqs = encoding.scaling.frequencies(positions.frequencies(64, 5e5), 5e5, len(FAR))
    z = np.asarray(encoding.start_rotations(jnp.asarray(FAR)[None], 64))[0]
    angles = FAR[:, None] * freqs
    want = encoding.scaling.magnitude(len(FAR)) * np.concatenate(
        [np.cos(angles), np.sin(angles)], 1
    )
    assert np.abs(z - want).max() < 1e-3

    ones = jnp.ones((1, len(FAR), 1, 64), jnp.bfloat16)
    here, there = (
        rotate_heads(ones, encoding.start_rotations(jnp.asarray(FAR + s)[None], 64)[:, :, None])
        for s in (0, 1)
    )
    assert here.dtype == jnp.bfloat16
    assert float(jnp.abs(here - there).max(axis=-1).min()) > 1e-2


def test_distances_are_integers_however_far():
    """Float32 would still tell 131,071 from 131,070; bfloat16 computes with neither."""
    far = jnp.asarray([[131_070, 131_071]])
    np.testing.assert_array_equal(distances(far, far[:, :1]), [[[0], [1]]])
    config = tiny(position="alibi", dtype="bfloat16", num_layers=1)
    params, ids = random_params(config), tokens(config)
    near, away = (
        logits(config, params, ids, positions=jnp.arange(LENGTH)[None] + s) for s in (0, 131_000)
    )
    np.testing.assert_array_equal(near, away)


@pytest.mark.parametrize("name", ["rope-dynamic", "tape-dynamic-yarn", "rope-yarn", "xpos", "fire"])
def test_a_longer_call_leaves_nothing_behind(name):
    config, params = model(name)
    short, long = tokens(config), tokens(config, length=40)
    before = logits(config, params, short)
    other = logits(config, params, long)
    np.testing.assert_array_equal(logits(config, params, short), before)
    # The length matters to the first two, and to those only.
    same = np.allclose(other[:, :LENGTH], logits(config, params, long[:, :LENGTH]), atol=1e-4)
    assert same == ("dynamic" not in name)


# --- Randomized positions -------------------------------------------------------------------------


def test_draws_are_ordered_uniform_and_without_repetition():
    draw = np.asarray(ordered_draw(jax.random.key(0), 4000, 5, 20))
    assert (np.diff(draw, axis=1) > 0).all() and draw.min() == 0 and draw.max() == 19
    counts = np.bincount(draw.ravel(), minlength=20)
    np.testing.assert_allclose(counts, 1000, atol=6 * np.sqrt(1000 * 0.75))
    np.testing.assert_array_equal(
        np.asarray(ordered_draw(jax.random.key(1), 3, 20, 20))[0], range(20)
    )


def test_randomized_positions_by_key_and_at_evaluation():
    encoding = positions.Randomized(max_position=64)
    one, again, other = (
        np.asarray(encoding.training_positions(jax.random.key(s), 3, 8)) for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any() and (one[0] != one[1]).any()
    np.testing.assert_array_equal(encoding.default_positions(8), np.arange(8)[None])
    drawn = positions.Randomized(max_position=64, evaluation="draw", seed=3)
    np.testing.assert_array_equal(drawn.default_positions(8), drawn.default_positions(8))
    assert (drawn.default_positions(8) != np.arange(8)).any()
    # In a model: the inner encoding at those positions.
    config = tiny(position=drawn)
    params, ids = random_params(config), tokens(config, length=8)
    plain = tiny(position="rope")
    np.testing.assert_array_equal(
        logits(config, params, ids),
        logits(plain, params, ids, positions=drawn.default_positions(8)),
    )


# --- TAPE's fields --------------------------------------------------------------------------------

STARTING_AS_ROPE = ["tape", "tape-unit", "tape-official", "tape-attention", "tape-mlp"]
STARTING_AS_ROPE += ["tape-separate", "tape-vectorial", "tape-nonequivariant", "tape-learned"]


@pytest.mark.parametrize("name", mostly_slow(STARTING_AS_ROPE, quick=["tape-nonequivariant"]))
def test_a_new_model_of_every_flavour_is_rope(name):
    from tape_jax import Transformer

    config = tiny(position=EVERY[name], initializer_range=0.3)
    ids = jnp.asarray(tokens(config))
    params = Transformer(config).init(jax.random.key(3), ids)["params"]
    shared = {k: v for k, v in params.items() if k != "position"}
    shared["layers"] = {k: v for k, v in params["layers"].items() if k != "position"}
    rope = logits(tiny(position="rope"), shared, ids)
    np.testing.assert_allclose(logits(config, params, ids), rope, atol=1e-4)


@pytest.mark.parametrize("name", ["tape-unit", "tape-blocks-unit", "tape-yarn"])
def test_unit_states_keep_their_modulus(name):
    config, _ = model(name)
    _, states = everything(name, tokens(config))
    parts = states.reshape(*states.shape[:-1], -1, 8) if "blocks" in name else states
    if "blocks" in name:
        size = np.linalg.norm(parts, axis=-1) / np.sqrt(2)
    else:
        size = np.hypot(*np.split(states, 2, axis=-1))
    magnitude = config.position.scaling.magnitude(LENGTH)
    np.testing.assert_allclose(size[0], magnitude, atol=1e-5)
    np.testing.assert_allclose(size[1:], magnitude, atol=1e-5)
    assert np.abs(states[1:] - states[:1]).max() > 0.1  # and they do move


def test_ablations_leave_out_what_they_say():
    names = {}
    for name in ("tape", "tape-attention", "tape-mlp"):
        _, params = model(name)
        names[name] = set(params["layers"]["position"])
    assert names["tape"] == names["tape-attention"] | names["tape-mlp"]
    assert names["tape-attention"] == {"post"} and "post" not in names["tape-mlp"]
    config, _ = model("tape-mlp")
    assert config.position.values(jnp.zeros((1, 1, 1, 8))) is None


# --- Bad input ------------------------------------------------------------------------------------


def error(message, encoding, **fields):
    return pytest.param(encoding, fields, message, id=message[:40])


@pytest.mark.parametrize(
    ("encoding", "fields", "message"),
    [
        error(
            "scaling.factor=0.0 must be >= 1: scaling 'yarn'", RoPE(scaling=positions.YarnScaling())
        ),
        error("scaling.factor=0.5 must be >= 1", RoPE(scaling=positions.NTKScaling(0.5))),
        error("scaling.original=0 must be >= 1", RoPE(scaling=positions.Llama3Scaling(8.0))),
        error(
            r"scaling.low=4.0 must lie in \(0, high=1.0\)",
            RoPE(scaling=positions.Llama3Scaling(8.0, 64, 4.0, 1.0)),
        ),
        error(
            "scaling.beta_slow=40.0",
            RoPE(scaling=positions.YarnScaling(8.0, 64, beta_slow=40.0)),
        ),
        error(
            "unknown position.scaling.ramp 'idx'; did you mean index",
            RoPE(scaling=positions.YarnScaling(8.0, 64, ramp="idx")),
        ),
        error("position.log_length=1 must be >= 2", RoPE(log_length=1)),
        error("position.scale=0.0 must be > 0", positions.XPos(scale=0.0)),
        error("position.max_position=0", positions.Randomized(max_position=0)),
        error(
            "unknown position.evaluation 'plane'; did you mean plain",
            positions.Randomized(evaluation="plane"),
        ),
        error("position.base=0.5", positions.Randomized(inner=RoPE(base=0.5))),
        error("position.buckets=7 must be even", positions.T5(buckets=7)),
        error("position.max_distance=16 must exceed", positions.T5(max_distance=16)),
        error("position.threshold=0.0 must be > 0", positions.Fire(threshold=0.0)),
        error("position.count=0", positions.CoPE(count=0)),
        error("cannot sum along rows", positions.CoPE(), attention="xla"),
        error("position.inner.name='rope' has no bias", positions.Dape(inner=RoPE())),
        error("position.alpha=0.0", positions.TAPA(alpha=0.0)),
        error("position.theta=1.0 must leave channels", positions.TAPA(theta=1.0)),
        error("unknown position.phase 'cubic'", positions.TAPA(phase="cubic")),
        error(
            "must be even for position.name='sinusoidal'",
            positions.Sinusoidal(),
            hidden_size=33,
            head_dim=8,
        ),
        error("unknown position.mixing 'head'; did you mean heads", positions.Tape(mixing="head")),
        error("mixes heads only", positions.Tape(block=(2, 2), mixing="all")),
        error(
            "position.base=500.0 shapes the start 'rotary'",
            positions.Tape(base=500.0, start=positions.Fourier()),
        ),
        error("length_scale=0.0 must be > 0", positions.Tape(start=positions.Fourier(0.0))),
        error("start.max_position=0", positions.Tape(start=positions.Learned(0))),
    ],
)
def test_fields_that_cannot_work(encoding, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(position=encoding, **fields)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (positions.Randomized(max_position=8), "position.max_position >= 9, not 8"),
        (positions.Tape(start=positions.Learned(8)), "start.max_position >= 9, not 8"),
        (positions.XPos(scale=0.1), "reach further than 3"),
    ],
)
def test_sequences_longer_than_an_encoding_allows(encoding, message):
    config = tiny(position=encoding)
    with pytest.raises(ValueError, match=message):
        logits(config, random_params(config), tokens(config, length=9))


def test_a_position_outside_a_learned_table_is_not_a_silent_neighbour():
    config = tiny(position=positions.Tape(start=positions.Learned(8)), num_layers=1)
    params, ids = random_params(config), tokens(config, length=4)
    for outside in (8, -1):
        where = jnp.asarray([[0, 1, 2, outside]])
        out = logits(config, params, ids, positions=where)
        assert np.isnan(out[:, 3]).all() and np.isfinite(out[:, :3]).all()


def test_names_and_variants():
    assert {"tape-unit", "tapa-linear", "dape-kerple"} <= set(positions.VARIANTS)
    for name in positions.names():
        assert positions.get(name).name == name
    assert positions.get("tape-unit", width=8) == positions.Tape(unit=True, width=8)
    with pytest.raises(ValueError, match="did you mean tape-unit"):
        positions.get("tape-unot")
    with pytest.raises(ValueError, match="field of position 'fire' 'widht'; did you mean width"):
        positions.get("fire", widht=3)
