"""Eight devices give what one gives, and really share the work."""

import collections
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import LinearBias, ScoreMod
from tape_jax import ModelConfig, Transformer
from tape_jax.sharded_attention import sharded_attention
from tape_jax.sharding import (
    MESH_AXES,
    constrain,
    parameter_axes,
    parameter_shardings,
    partition_spec,
)
from tests.kernels_on_cpu import run_on_cpu
from tests.tiny import random_params, tiny, tokens
from train.data.pipeline import to_device
from train.mesh import MeshConfig, check_divisible, make_mesh
from train.step import loss_sums

pytestmark = pytest.mark.multidevice

MESHES = {
    "data=8": MeshConfig(data=8),
    "fsdp=8": MeshConfig(data=1, fsdp=8),
    "tensor=4 data=2": MeshConfig(data=2, tensor=4),
    "fsdp=4 tensor=2": MeshConfig(data=1, fsdp=4, tensor=2),
    "data=2 fsdp=2 context=2": MeshConfig(data=2, fsdp=2, context=2),
}


def example(config, batch=8, length=12):
    ids = tokens(config, batch=batch, length=length + 1).astype(np.int32)
    weights = np.random.default_rng(1).integers(0, 2, (batch, length)).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def loss_and_gradients(config, params, batch):
    grad = jax.value_and_grad(lambda p: loss_sums(p, Transformer(config), batch)[0])
    return grad(params)


@pytest.mark.parametrize(
    ("name", "scan", "attention"),
    [
        *((name, True, "reference") for name in MESHES),
        ("fsdp=4 tensor=2", False, "xla"),
        ("data=2 fsdp=2 context=2", True, "xla"),
        ("data=2 fsdp=2 context=2", True, "pallas"),
    ],
)
def test_loss_and_gradients_equal_one_device(name, scan, attention, monkeypatch):
    run_on_cpu(attention, monkeypatch)
    config = tiny(scan_layers=scan, vocab_size=32, attention=attention)
    params, batch = random_params(config, scale=0.2), example(config)
    loss, grads = jax.jit(lambda p, b: loss_and_gradients(config, p, b))(params, batch)
    mesh = make_mesh(MESHES[name])
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, parameter_shardings(params, mesh))
        global_batch = to_device(batch, mesh, config.vocab_size)
        step = jax.jit(lambda p, b: loss_and_gradients(config, p, b))
        sharded_loss, sharded_grads = step(placed, global_batch)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    for path, want in jax.tree_util.tree_flatten_with_path(grads)[0]:
        got = sharded_grads
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(
            np.asarray(got), want, rtol=0, atol=1e-5 * float(jnp.abs(want).max())
        )


COLLECTIVES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def collectives(mesh, implementation, heads=(8, 4), biased=False):
    """Sharded attention over this mesh equals attention.

    Returns:
      the collectives in its compiled gradient, and whether gradients lie where their arrays do.
    """
    rng = np.random.default_rng(0)
    shapes = [(8, 16, heads[0], 16), *[(8, 16, heads[1], 16)] * 3]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (8, 16))), jnp.int32)
    slopes = jnp.asarray(2.0 ** -np.arange(heads[0]), jnp.float32)

    def loss(arrays, ids):
        both = sharded_attention(
            *arrays,
            segment_ids=ids,
            score_mod=LinearBias(slopes, 3 * ids, jnp.arange(16)[None]) if biased else None,
            implementation=implementation,
        )
        return sum((x**2).sum(axis=(1, 2, 3)) for x in both)

    def grad(arrays, ids):  # by row: a sum over rows would be a collective of its own
        losses, pull = jax.vjp(lambda arrays: loss(arrays, ids), arrays)
        return losses, pull(jnp.ones_like(losses))[0]

    want = grad(arrays, ids)
    with jax.set_mesh(mesh):
        spec = partition_spec(("batch", "length", "kv_heads", None), shapes[1], mesh)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec(spec[0], None)))
        compiled = jax.jit(grad).lower(placed, ids).compile()
        got = compiled(placed, ids)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)
    kept = [a.sharding.is_equivalent_to(b.sharding, 4) for a, b in zip(got[1], placed, strict=True)]
    text = compiled.as_text()
    counts = collections.Counter(re.findall(rf"= .*?\b({COLLECTIVES})(?:-start)?\(", text))
    return dict(counts), all(kept)


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas", "tpu"])
def test_attention_stays_where_its_arrays_live(implementation, monkeypatch):
    """Over rows and heads: forward and backward, values and gradients, without a collective."""
    run_on_cpu(implementation, monkeypatch)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    # The loss of a row sums over heads, which are cut over "tensor": nothing else does.
    assert collectives(mesh, implementation) == ({"all-reduce": 1}, True)
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    assert collectives(mesh, implementation) == ({}, True)


def test_sequences_cut_over_devices_are_traded_for_heads(monkeypatch):
    """All-to-alls only: nothing is gathered, nothing but the loss is reduced."""
    run_on_cpu("pallas", monkeypatch)
    mesh = make_mesh(MeshConfig(data=2, context=4))
    found, kept = collectives(mesh, "pallas")
    assert kept and found.keys() == {"all-reduce", "all-to-all"} and found["all-reduce"] == 1
    assert found["all-to-all"] <= 12  # q, k, v, e in and two out, and the same back


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ({"data": 2, "tensor": 4}, {"all-reduce": 1}),
        ({"data": 2, "context": 4}, {"all-reduce": 1, "all-to-all": 12}),
        ({"data": 2, "context": 2, "tensor": 2}, {"all-reduce": 2, "all-to-all": 12}),
    ],
    ids=str,
)
def test_a_linear_bias_is_cut_as_its_heads_are(sizes, counts, monkeypatch):
    """Over rows and heads, and over the heads that lengths are traded for; groups stay whole.

    Nothing is gathered, and nothing but the loss reduced: over heads and over lengths.
    """
    run_on_cpu("pallas", monkeypatch)
    mesh = make_mesh(MeshConfig(**sizes))
    assert collectives(mesh, "pallas", biased=True) == (counts, True)


def test_too_few_heads_to_trade(monkeypatch):
    """Two heads over four devices of a sequence: gathered, and right."""
    run_on_cpu("pallas", monkeypatch)
    found, _ = collectives(make_mesh(MeshConfig(data=2, context=4)), "pallas", heads=(4, 2))
    assert "all-gather" in found


def test_attention_with_a_score_modifier_is_left_to_the_partitioner():
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    slopes = jnp.asarray([0.5, 0.25, 0.1, 0.01])
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(4, 16, 4, 8))) for i in range(3))

    def attend(q, k, v):
        mod = lambda s, i, j: s - slopes[:, None, None] * (i[:, None] - j[None, :])  # noqa: E731
        return sharded_attention(q, k, v, None, segment_ids=None, score_mod=ScoreMod(mod))[0]

    with jax.set_mesh(mesh):
        sharded = jax.jit(attend)(q, k, v)
    np.testing.assert_allclose(sharded, attend(q, k, v), atol=1e-6)


def test_fsdp_cuts_almost_every_byte():
    """More than 98 % of the parameter bytes of the 155M model are on one device only."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    shapes = jax.eval_shape(
        Transformer(ModelConfig()).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )["params"]
    shardings = parameter_shardings(shapes, mesh)
    whole = here = 0
    for shape, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        whole += shape.size if sharding.shard_shape(shape.shape) == shape.shape else 0
        here += shape.size
    assert whole / here < 0.02


def logits_sharding(config, params, batch, context):
    with context, warnings.catch_warnings(action="ignore"):  # `with mesh:` is deprecated
        compiled = (
            jax.jit(lambda p, ids: Transformer(config).apply({"params": p}, ids))
            .lower(params, batch["tokens"])
            .compile()
        )
    return compiled.output_shardings


def test_activations_carry_the_batch_sharding():
    """Under set_mesh the constraint in the model alone shards the logits; under `with mesh:` not.

    Neither inputs nor outputs are given a sharding here: only `constrain` can cause one.
    """
    config, mesh = tiny(), make_mesh(MESHES["data=2 fsdp=2 context=2"])
    params, batch = random_params(config), example(config)
    acting = logits_sharding(config, params, batch, jax.set_mesh(mesh))
    assert acting.shard_shape((8, 12, 31)) == (2, 6, 31)
    idle = logits_sharding(config, params, batch, mesh)
    assert idle.is_fully_replicated


def test_collision_and_unknown_axis():
    mesh = make_mesh(MESHES["fsdp=4 tensor=2"])
    with pytest.raises(ValueError, match="'heads' and 'mlp' of one array both map to 'tensor'"):
        partition_spec(("heads", "mlp"), (8, 8), mesh)
    with pytest.raises(ValueError, match="logical axis 'head' has no rule"):
        partition_spec(("head",), (8,), mesh)
    assert partition_spec(("embed", "vocab"), (32, 19), mesh) == PartitionSpec(("fsdp",), None)


def test_every_parameter_has_axes():
    config = tiny(attention_bias=True, mlp_bias=True)
    for path, leaf in jax.tree_util.tree_flatten_with_path(random_params(config))[0]:
        name = "/".join(key.key for key in path)
        assert len(parameter_axes(name, leaf.ndim)) == leaf.ndim
    with pytest.raises(ValueError, match="PARAMETER_AXES"):
        parameter_axes("layers/attention/gate/kernel", 3)


def test_constrain_leaves_manual_axes_alone():
    mesh = make_mesh(MESHES["data=8"])
    x = jnp.arange(16.0).reshape(8, 2)
    with jax.set_mesh(mesh):
        doubled = jax.jit(
            jax.shard_map(
                lambda row: 2 * constrain(row, "batch", None),
                mesh=mesh,
                in_specs=PartitionSpec("data"),
                out_specs=PartitionSpec("data"),
            )
        )(x)
    np.testing.assert_array_equal(doubled, 2 * x)


def test_make_mesh_fills_and_is_auto():
    mesh = make_mesh(MeshConfig(data=-1, tensor=2))
    assert isinstance(mesh, Mesh) and mesh.axis_names == MESH_AXES
    assert tuple(mesh.shape.values()) == (4, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert math.prod(mesh.shape.values()) == jax.device_count()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(data=3), r"mesh.data=3 .* must multiply to the 8 device"),
        (MeshConfig(data=-1, fsdp=-1), r"at most one of them -1"),
        (MeshConfig(data=0), r"must be >= 1"),
        (MeshConfig(data=-1, tensor=5), r"mesh.tensor=5"),
    ],
)
def test_mesh_sizes_that_cannot_be(mesh, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(mesh)


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (MeshConfig(), {"batch": 12}, r"batch_size / accumulation=12 .*mesh.fsdp=8"),
        (MeshConfig(), {"batch": 16, "accumulation": 4}, r"batch_size / accumulation=4"),
        (MeshConfig(), {"accumulation": 3}, r"batch_size=16 .* accumulation=3"),
        (MeshConfig(context=8), {}, r"sequence length=12 .*mesh.context=8"),
        (MeshConfig(tensor=8), {}, r"model.num_heads=4 .*mesh.tensor=8"),
        (MeshConfig(tensor=4), {"num_kv_heads": 2}, r"model.num_kv_heads=2 .*mesh.tensor=4"),
        (
            MeshConfig(data=1, fsdp=8),
            {"hidden_size": 36, "head_dim": 8},
            r"hidden_size=36 .*mesh.fsdp=8",
        ),
        (MeshConfig(tensor=4), {"intermediate_size": 49}, r"intermediate_size=49"),
    ],
)
def test_sizes_that_do_not_divide(mesh, changes, message):
    sizes = {"batch": 16, "accumulation": 1, "length": 12}
    sizes |= {k: changes.pop(k) for k in list(changes) if k in sizes}
    with pytest.raises(ValueError, match=message):
        check_divisible(
            mesh, 8, tiny(**changes), sizes["batch"], sizes["accumulation"], sizes["length"]
        )
