"""What can be proved of the kernels without their devices: lowering, registers, memory, choice."""

import ast
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import configs
import pallas_kernels
from benchmarks import registers
from benchmarks.fit import Fit, experiment, lower
from benchmarks.registers import Registers
from pallas_kernels import LinearBias, decode, flash, gpu, implementations, tape_attention, tiles
from pallas_kernels.implementations import IMPLEMENTATIONS, Implementation
from pallas_kernels.tiles import Tile, Tiles
from tests.target import device, kernels, reported
from train import targets

WIDTHS = (16, 32, 48, 64, 72, 80, 96, 128)


def gradient(implementation, segments=False, biased=False, **arguments):
    """Forward and backward of one call, as a function of arrays and segment ids.

    With `biased` the scores have a linear bias, whose positions are the segment ids.
    """

    def grad(arrays, ids):
        bias = LinearBias(jnp.ones(arrays[0].shape[2]), ids, ids) if biased else None

        def loss(arrays):
            both = tape_attention(
                *arrays,
                segment_ids=ids if segments else None,
                score_mod=bias,
                implementation=implementation,
                **arguments,
            )
            return sum(x.astype(jnp.float32).sum() for x in both if x is not None)

        return jax.value_and_grad(loss)(arrays)

    return grad


def shapes(sharding, width, dtype="bfloat16", n=1024, heads=(8, 8), e_width=None):
    """Abstract q, k, v, e and segment ids."""
    kind = lambda *s, t=dtype: jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=sharding)  # noqa: E731
    q, k = kind(1, n, heads[0], width), kind(1, n, heads[1], width)
    return (q, k, k, kind(1, n, heads[1], e_width or width)), kind(1, n, t="int32")


# --- GPU ------------------------------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape_of_the_table_lowers_for_a_gpu(width, dtype):
    sharding = SingleDeviceSharding(device("h200"))
    for segments in (False, True):
        arrays, ids = shapes(sharding, width, dtype, n=200, heads=(4, 2))
        text = targets.lower("h200", gradient("pallas", segments), arrays, ids).as_text()
        for kernel in tiles.KERNELS:
            assert text.count(f'name = "tape_attention_{kernel}"') == 1


@pytest.mark.aot
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"n": 1000},
        {"segments": True},
        {"causal": False},
        {"heads": (8, 2)},
        {"biased": True},
        {"biased": True, "segments": True, "heads": (8, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [64, 128])
def test_kernels_for_an_h200(width, case):
    """Tensor cores without serialization, no spills, and no more shared memory than estimated."""
    sharding, case = SingleDeviceSharding(device("h200")), dict(case)
    call = {name: case.pop(name) for name in ("segments", "causal", "biased") if name in case}
    lowered = targets.lower("h200", gradient("pallas", **call), *shapes(sharding, width, **case))
    found = kernels(lowered)
    chosen = tiles.choose(width, width, jnp.bfloat16, "9.0")
    # dk, dv and de of wide heads leave no register for a mask or a loop over grouped queries: up to
    # 29 of them spill, by the version of ptxas. The plain causal kernel has room. For a bias the
    # kernel of dq lacks three.
    spill = {"tape_attention_keys": 116} if width == 128 and (case or call) else {}
    if width == 128 and call.get("biased"):
        spill["tape_attention_queries"] = 12
    assert found.keys() == {f"tape_attention_{kernel}" for kernel in tiles.KERNELS}
    for name, kernel in found.items():
        tile = getattr(chosen, name.removeprefix("tape_attention_"))
        assert kernel.spilled <= spill.get(name, 0), kernel
        assert kernel.registers <= 255
        assert kernel.wgmma > 0 and kernel.mma == 0, kernel
        assert not kernel.serialized, kernel
        estimate = tiles.shared_memory(
            name.removeprefix("tape_attention_"), tile, width, width, itemsize=2
        )
        assert 0.5 * estimate < kernel.shared_memory <= estimate


@pytest.mark.aot
@pytest.mark.parametrize(("width", "dtype"), [(16, "bfloat16"), (96, "bfloat16"), (64, "float32")])
def test_the_table_of_registers(width, dtype):
    """No spills at other widths and in float32, whose products are not rounded to fit wgmma."""
    device("h200")
    found = reported(registers.report, width, Registers(dtype=dtype))
    chosen, itemsize = tiles.choose(width, width, dtype, "9.0"), jnp.dtype(dtype).itemsize
    for name in tiles.KERNELS:
        kernel, tile = found[name], getattr(chosen, name)
        assert kernel.spilled == 0, (name, kernel)
        assert (kernel.wgmma > 0) == (dtype == "bfloat16")
        assert kernel.shared_memory <= tiles.shared_memory(name, tile, width, width, itemsize)


@pytest.mark.aot
@pytest.mark.parametrize(("biased", "rows"), [(False, "32x4x8x128"), (True, "32x1x32x128")])
def test_one_query_over_a_long_cache_for_an_h200(biased, rows):
    """Keys are split into 32 parts, with the 4 rows of a group in one tile; a bias differs by head.

    Many small programs, with tiles no taller than the group needs.
    """
    sharding = SingleDeviceSharding(device("h200"))
    kind = lambda *s, t="bfloat16": jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=sharding)  # noqa: E731
    q, k = kind(1, 1, 32, 128), kind(1, 8192, 8, 128)
    order = kind(1, 1, t="int32"), kind(1, 8192, t="int32")

    def step(q, k, v, e, order):
        bias = LinearBias(jnp.ones(32), *order) if biased else None
        return tape_attention(q, k, v, e, positions=order, score_mod=bias, implementation="pallas")

    lowered = targets.lower("h200", step, q, k, k, k, order)
    (kernel,) = kernels(lowered).values()
    assert kernel.spilled == 0 and kernel.mma > 0
    assert f"{rows}xbf16" in lowered.as_text()


def test_every_pallas_call_says_how_it_is_compiled():
    """Pallas's default backend has changed before: each call passes `compiler_params`."""
    folder = pathlib.Path(pallas_kernels.__file__).parent
    calls = [
        node
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pallas_call"
    ]
    assert calls
    for call in calls:
        assert "compiler_params" in {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize(
    ("kernel", "products"),
    [("forward", 3), ("keys", 6), ("queries", 4)],
)
def test_each_kernel_computes_its_scores_once(kernel, products):
    """Matrix products of one tile: scores once, and what each of two streams needs.

    forward: q k, P v, P e. keys: k q, P do, P de, v do, e de, dS q. queries: q k, do v, de e, dS k.
    Three separate calls would compute scores three times in each.
    """
    arrays, ids = shapes(None, 64, n=128)
    jaxpr = jax.make_jaxpr(gradient("pallas", causal=False))(arrays, ids)
    bodies = {
        eqn.params["name"]: eqn.params["jaxpr"]
        for eqn in _equations(jaxpr.jaxpr)
        if eqn.primitive.name == "pallas_call"
    }
    assert len(bodies) == 3
    names = [eqn.primitive.name for eqn in _equations(bodies[f"tape_attention_{kernel}"])]
    assert names.count("dot_general") == products
    assert names.count("exp2") == (2 if kernel == "forward" else 1)  # forward: the sums shrink


def _equations(jaxpr):
    """All equations, those of loops and calls within included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


@pytest.mark.aot
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("attention", 1), ("full", 2)])
def test_kernels_of_a_training_step(remat, forwards):
    """Each kernel once a layer; the forward again only where a policy keeps nothing of it."""
    # JAX keeps every pallas_call there is; XLA drops those that nobody reads.
    text = compiled_step("h200", remat).as_text()
    counts = [
        len(re.findall(rf"custom-call\(.*tape_attention_{kernel}", text))
        for kernel in tiles.KERNELS
    ]
    assert counts == [2 * forwards, 2, 2]


@pytest.mark.aot
@pytest.mark.parametrize(("remat", "forwards"), [("attention", 1), ("full", 2)])
def test_kernels_of_a_training_step_on_a_tpu(remat, forwards):
    text = compiled_step("v5e", remat).as_text()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 2 * (forwards + 2)


def compiled_step(name, remat):
    """A training step of two small layers, compiled."""
    device(name)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "vocab_size": 64}
    fit = Fit(target=name, layers=2, remat=remat)
    return lower(experiment("tape", 1, 128, fit, **small), name).compile()


@pytest.mark.aot
def test_memory_of_a_training_step_is_linear_in_the_length():
    """On an H200 one sequence of 4,096 takes what four of 1,024 take."""
    device("h200")
    small = {"vocab_size": 64}
    long, short = (
        lower(experiment("tape", batch, length, Fit(layers=1), **small), "h200")
        .compile()
        .memory_analysis()
        for batch, length in ((1, 4096), (4, 1024))
    )
    assert abs(long.temp_size_in_bytes / short.temp_size_in_bytes - 1) < 0.02


@pytest.mark.parametrize("name", configs.names())
def test_every_shipped_model_has_a_fused_path_on_each_accelerator(name):
    model = configs.get(name).model
    q, k = (
        jnp.zeros((1, 16, h, model.head_width), "bfloat16")
        for h in (model.num_heads, model.kv_heads)
    )
    call = {"causal": True, "order": None, "segment_ids": None, "scale": 1.0, "score_mod": None}
    for fused in ("pallas", "tpu"):
        assert IMPLEMENTATIONS[fused].refusal(q, k, k, k, **call) is None


# --- TPU ------------------------------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v5e", "v5p"])
def test_splash_compiles_for_a_tpu(name):
    sharding = SingleDeviceSharding(device(name))
    for width, n, segments in ((128, 1024, False), (64, 1000, True)):
        arrays, ids = shapes(sharding, width, n=n, heads=(4, 2))
        lowered = targets.lower(name, gradient("tpu", segments), arrays, ids)
        assert lowered.as_text().count("tpu_custom_call") == 3
        lowered.compile()


@pytest.mark.aot
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_lowers_for_a_tpu(width):
    sharding = SingleDeviceSharding(device("v5e"))
    arrays, ids = shapes(sharding, width, n=200, heads=(4, 2))
    text = targets.lower("v5e", gradient("tpu", True), arrays, ids).as_text()
    assert text.count("tpu_custom_call") == 3


# --- Tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", tiles.SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_tile_fits_its_device(capability, dtype):
    limit, itemsize = tiles.SHARED_MEMORY[capability], jnp.dtype(dtype).itemsize
    for width in WIDTHS:
        for e_width in (0, width):
            chosen = tiles.choose(width, e_width, dtype, capability)
            for kernel in tiles.KERNELS:
                tile = getattr(chosen, kernel)
                assert tiles.shared_memory(kernel, tile, width, e_width, itemsize) <= limit


def test_a_small_device_gets_smaller_tiles_and_a_tiny_one_an_error():
    large = tiles.choose(128, 128, "bfloat16", "9.0")
    small = tiles.choose(128, 128, "bfloat16", "9.0", limit=101_376)
    assert large.forward == Tile(128, 64, 8, 2)
    assert small.forward == Tile(128, 64, 8, 1)
    assert small.keys.block_q * small.keys.block_k < large.keys.block_q * large.keys.block_k or (
        small.keys.num_stages < large.keys.num_stages
    )
    with pytest.raises(ValueError, match=r"head width 128 needs \d+ bytes .* the device has 4096"):
        tiles.choose(128, 128, "bfloat16", "9.0", limit=4096)


def test_capabilities_between_and_beyond_the_known():
    known = {"8.0": 1, "8.6": 2, "9.0": 3, "10.0": 4}
    nearest = [tiles.nearest(c, known) for c in ("7.5", "8.0", "8.9", "9.0", "10.3", "12.1")]
    assert nearest == ["8.0", "8.0", "8.6", "9.0", "10.0", "10.0"]


def test_tiles_shrink_to_the_sequence():
    tall = Tiles(*[Tile(128, 64, 4, 2)] * 3)
    assert tall.within(1, 40).forward == Tile(16, 64, 4, 2)
    assert tall.within(70, 1000).keys == Tile(128, 64, 4, 2)


# --- What a kernel visits -------------------------------------------------------------------------


def spec(n_q, n_k, causal=True):
    tile = Tile(16, 32, 4, 1)
    return flash.Spec(n_q, n_k, 1.0, causal, False, Tiles(tile, tile, tile), (None, None))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_visits_cover_all_that_is_read(seed, causal):
    rng = np.random.default_rng(seed)
    n_q, n_k, segments = 70, 100, rng.integers(1, 6)
    ids = lambda n: jnp.asarray(rng.integers(-1, segments, (2, n)))  # noqa: E731
    order = jnp.asarray(rng.integers(0, 100, (2, n_q))), jnp.asarray(rng.integers(0, 100, (2, n_k)))
    one = spec(n_q, n_k, causal)
    side = flash.make_side(one, 2, order, (ids(n_q), ids(n_k)))
    by_query, by_key = (np.asarray(x) for x in flash.visits(one, side, 16, 32))
    pairs = [x[:, :, None] if i % 2 == 0 else x[:, None] for i, x in enumerate(side)]
    mask = np.asarray(flash.readable(one, *pairs))
    for b, n, m in zip(*np.nonzero(mask), strict=True):
        i, j = n // 16, m // 32
        assert by_query[b, i, 0] <= j < by_query[b, i, 1]
        assert by_key[b, j, 0] <= i < by_key[b, j, 1]


def test_packed_documents_visit_their_own_tiles_only():
    ids = jnp.repeat(jnp.arange(4), 64)[None]
    one = spec(256, 256)
    by_query, by_key = flash.visits(one, flash.make_side(one, 1, None, (ids, ids)), 16, 32)
    lengths = np.asarray(by_query[0, :, 1] - by_query[0, :, 0])
    assert lengths.tolist() == [1, 1, 2, 2] * 4  # of 1, 1, 2, 2, 3, ... 8 without segments
    assert np.asarray(by_key[0, :, 1] - by_key[0, :, 0]).tolist() == [4, 2] * 4


def test_the_empty_end_of_a_cache_is_not_visited():
    one = spec(1, 1024)
    order = jnp.full((1, 1), 70), jnp.arange(1024)[None]
    by_query, _ = flash.visits(one, flash.make_side(one, 1, order, None), 16, 32)
    assert by_query.tolist() == [[[0, 3]]]


@pytest.mark.parametrize(
    ("n_q", "n_k", "heads", "parts"),
    [(1, 8192, (32, 8), 32), (1, 511, (4, 4), 1), (100, 8192, (8, 8), 1), (1, 1009, (4, 4), 1)],
)
def test_parts_of_a_cache(n_q, n_k, heads, parts):
    q, k = jnp.zeros((1, n_q, heads[0], 16)), jnp.zeros((1, n_k, heads[1], 16))
    assert decode._parts(q, k) == parts


# --- Choice ---------------------------------------------------------------------------------------


@pytest.fixture
def prefer(monkeypatch):
    """Makes this platform prefer "pallas", as an implementation made up by the test."""
    remembered = implementations._compiles

    def install(attend, **options):
        monkeypatch.setitem(IMPLEMENTATIONS, "pallas", Implementation(attend, **options))
        monkeypatch.setitem(implementations.PREFERENCE, "cpu", ("pallas", "xla"))

    remembered.cache_clear()
    yield install
    remembered.cache_clear()


def broken(*_, **__):
    raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")


def test_without_a_name_what_does_not_compile_is_passed_over_and_said_once(prefer, caplog):
    prefer(broken)
    x = jnp.ones((1, 128, 2, 16))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = jax.jit(lambda x: tape_attention(x, x, x, x)[0])(x)
    assert caplog.text.count("'pallas' does not compile here") == 1
    assert "Shared memory size limit" in caplog.text
    np.testing.assert_allclose(out, tape_attention(x, x, x, implementation="xla")[0], atol=1e-6)


def test_a_name_is_never_passed_over():
    x = jnp.ones((1, 128, 2, 16))
    # Not a fall-back but JAX's own word that this platform compiles no GPU kernel.
    with pytest.raises(ValueError, match="interpret"):
        tape_attention(x, x, x, x, implementation="pallas")


def test_without_a_name_what_refuses_is_not_tried(prefer, monkeypatch):
    prefer(broken, refusal=lambda *_, **__: "anything")
    monkeypatch.setattr(implementations, "_compiles", broken)
    x = jnp.ones((1, 128, 2, 16))
    assert tape_attention(x, x, x, x)[0].shape == x.shape


def test_choosing_compiles_with_a_linear_bias(prefer, caplog):
    """What is compiled on trial, apart from the trace, has the bias that the call has."""
    seen = []

    def attend(*arrays, score_mod, **arguments):
        seen.append(score_mod)
        return IMPLEMENTATIONS["reference"].attend(*arrays, score_mod=score_mod, **arguments)

    prefer(attend)

    def loss(x, positions):
        bias = LinearBias(jnp.asarray([0.5, 0.25]), positions, positions)
        return tape_attention(x, x, x, x, score_mod=bias)[0].sum()

    jax.jit(jax.grad(loss))(jnp.ones((1, 128, 2, 16)), jnp.arange(128)[None])
    trial, call = seen
    assert not caplog.text
    assert jax.tree.map(jnp.shape, trial) == jax.tree.map(jnp.shape, call)


@pytest.mark.parametrize("device", ["cpu", None, jax.devices("cpu")[0]])
def test_the_platform_is_that_of_the_default_device(device):
    with jax.default_device(device):
        assert implementations.platform() == "cpu"


def test_choosing_survives_a_trace_within_a_mesh(prefer, caplog):
    """Trial compilation happens apart from the trace, mesh and shard_map it is asked from."""
    prefer(IMPLEMENTATIONS["reference"].attend)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    ids = jnp.zeros((2, 128), jnp.int32)

    def body(x, ids):
        return tape_attention(x, x, x, x, segment_ids=ids)[0]

    with jax.set_mesh(mesh):
        sharded = jax.shard_map(body, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        out = jax.jit(jax.grad(lambda x: sharded(x, ids).sum()))(jnp.ones((2, 128, 2, 16)))
    assert np.isfinite(out).all() and not caplog.text


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("pallas", {"width": 20}, "q of width 20: a multiple of 8 up to 128"),
        ("pallas", {"width": 136}, "q of width 136"),
        ("pallas", {"e_width": 12}, "e of width 12"),
        ("pallas", {"dtype": "int32"}, "dtype int32"),
        ("cudnn", {"dtype": "float32"}, "dtype float32: bfloat16 or float16"),
        ("cudnn", {"width": 256, "dtype": "bfloat16"}, "add up to 512"),
        ("cudnn", {"e_width": 4, "dtype": "bfloat16"}, "add up to 20"),
        ("tpu", {"dtype": "float16"}, "dtype float16"),
    ],
)
def test_refusals_name_what_they_refuse(name, change, reason):
    width, e_width = change.get("width", 16), change.get("e_width")
    (q, k, v, e), _ = shapes(None, width, change.get("dtype", "float32"), 32, (2, 2), e_width)
    with pytest.raises(ValueError, match=rf"implementation='{name}' cannot honour .*{reason}"):
        jax.eval_shape(lambda *a: tape_attention(*a, implementation=name), q, k, v, e)


def test_the_gpu_kernels_are_the_pallas_ones():
    assert IMPLEMENTATIONS["pallas"].attend is gpu.fused
