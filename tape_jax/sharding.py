"""Where arrays live: logical axis names, the rules that map them to mesh axes, and their checks.

A mesh has the axes data, fsdp, context and tensor. Model code names the axes of its activations
with `constrain`; parameters get theirs from `PARAMETER_AXES` by path. Both go through `RULES`.
"""

import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "context", "tensor")

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": ("context",),
    "hidden": (),  # channels of an activation: whole on every device
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),  # channels of a parameter
    "layers": (),
}
"""Logical axis -> mesh axes. An axis that is absent from the mesh at hand shards nothing."""

PARAMETER_AXES: Sequence[tuple[str, tuple[str | None, ...]]] = (
    (r"embedding/embedding", ("vocab", "embed")),
    (r"head/kernel", ("embed", "vocab")),
    (r"(final|attention|mlp)_norm/scale", ("embed",)),
    (r"attention/query/kernel", ("embed", "heads")),
    (r"attention/(key|value)/kernel", ("embed", "kv_heads")),
    (r"attention/out/kernel", ("heads", "embed")),
    (r"attention/query/bias", ("heads",)),
    (r"attention/(key|value)/bias", ("kv_heads",)),
    (r"mlp/(gate|up)/kernel", ("embed", "mlp")),
    (r"mlp/down/kernel", ("mlp", "embed")),
    (r"mlp/(gate|up)/bias", ("mlp",)),
    (r".*/lora_[ab]", ()),  # of a rank too small to cut
    (r"(attention/out|mlp/down)/bias", ("embed",)),
    (r"position/gate/kernel", ("embed", None)),
    (r"(attention/)?position/.*", ()),  # what encodings learn: too small to cut
)
"""Parameter path (under an optional leading `layers/`) -> logical axes; the first match counts."""


def partition_spec(axes: Sequence[str | None], shape: Sequence[int], mesh) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes on this (abstract) mesh.

    A dimension that its mesh axes do not divide stays whole (a vocabulary of 19 on 4 devices);
    `train.mesh` refuses beforehand the sizes that must divide.

    Raises:
      ValueError: an unknown logical axis, or two axes of one array on the same mesh axis.
    """
    spec, taken = [], {}
    usable = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(RULES)}")
        mesh_axes = tuple(a for a in RULES[axis] if a in usable) if axis else ()
        for a in mesh_axes:
            if a in taken:
                raise ValueError(f"axes {taken[a]!r} and {axis!r} of one array both map to {a!r}")
            taken[a] = axis
        extent = math.prod(mesh.shape[a] for a in mesh_axes)
        spec.append(mesh_axes if mesh_axes and size % extent == 0 else None)
    return PartitionSpec(*spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fixes the sharding of an activation by its logical axes, under `jax.set_mesh(mesh)`.

    Without a mesh it does nothing; so it does under the deprecated `with mesh:`, which sets none.
    Axes of the mesh that are manual (inside `shard_map`) or explicit are left alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto not in mesh.axis_types:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))


def parameter_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter at this slash-separated path.

    Raises:
      ValueError: no entry of `PARAMETER_AXES` covers it.
    """
    stacked = path.startswith("layers/")
    for pattern, axes in PARAMETER_AXES:
        if re.fullmatch(pattern, path.removeprefix("layers/")):
            axes = (("layers",) if stacked else ()) + axes
            return axes + (None,) * (ndim - len(axes))
    raise ValueError(f"parameter {path!r} has no entry in tape_jax.sharding.PARAMETER_AXES")


def parameter_shardings(params, mesh: jax.sharding.Mesh):
    """A NamedSharding for every parameter of a tree of arrays or shapes."""

    def sharding(path, x):
        name = "/".join(str(key.key) for key in path)
        return NamedSharding(mesh, partition_spec(parameter_axes(name, x.ndim), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, params)
