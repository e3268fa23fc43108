"""The device mesh of a run, and the sizes that must divide over it."""

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh

from tape_jax.config import ModelConfig
from tape_jax.sharding import MESH_AXES


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; at most one may be -1, "all that are left".

    data: copies of the model on parts of the batch. fsdp: the same, with parameters and optimizer
    cut over it. context: parts of the sequence. tensor: heads, MLP channels and the vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def sizes(self, devices: int) -> tuple[int, ...]:
        """The four sizes for this many devices.

        Raises:
          ValueError: sizes that do not multiply to the devices.
        """
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        text = " ".join(f"mesh.{a}={s}" for a, s in zip(MESH_AXES, sizes, strict=True))
        if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
            raise ValueError(f"{text}: sizes must be >= 1, at most one of them -1")
        fixed = math.prod(s for s in sizes if s != -1)
        if devices % fixed or (-1 not in sizes and fixed != devices):
            raise ValueError(
                f"{text}: the sizes must multiply to the {devices} device(s) here; set one to -1"
            )
        return tuple(devices // fixed if s == -1 else s for s in sizes)


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices, with Auto axes: Linen needs those."""
    sizes = config.sizes(jax.device_count())
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_divisible(
    config: MeshConfig, devices: int, model: ModelConfig, batch: int, accumulation: int, length: int
) -> None:
    """Raises ValueError naming the first field that does not divide over the mesh."""
    data, fsdp, context, tensor = config.sizes(devices)
    rows = "mesh.data * mesh.fsdp"
    if accumulation < 1 or batch < 1 or batch % accumulation:
        raise ValueError(
            f"batch_size={batch} must be a positive multiple of accumulation={accumulation}"
        )
    for field, value, by, extent in (
        ("batch_size / accumulation", batch // accumulation, rows, data * fsdp),
        ("the sequence length", length, "mesh.context", context),
        ("model.hidden_size", model.hidden_size, "mesh.fsdp", fsdp),
        ("model.num_heads", model.num_heads, "mesh.tensor", tensor),
        ("model.num_kv_heads", model.kv_heads, "mesh.tensor", tensor),
        ("model.intermediate_size", model.intermediate_size, "mesh.tensor", tensor),
    ):
        if value % extent:
            fits = [d for d in range(1, extent + 1) if value % d == 0]
            raise ValueError(
                f"{field}={value} must be a multiple of {by}={extent}: use"
                f" {math.lcm(value, extent)}, or {by} among {fits}"
            )
