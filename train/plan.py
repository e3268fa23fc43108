"""Compile a run's step for devices that are not here: does it fit, and what takes the room?

python -m train.plan --config llama2-7b-8k --target h200 --devices 8

Nothing is trained and no data is read. Time and numerics need the device itself.
"""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

import configs
from tape_jax.sharding import MESH_AXES, partition_spec
from train import targets
from train.command_line import parse
from train.config import TrainConfig
from train.ending import command
from train.finetune import of_command
from train.pretrained import find
from train.step import abstract_params, abstract_state, jit_train_step, split

FUSED = {"cuda": "pallas", "tpu": "tpu"}
"""Platform -> the attention that is compiled when the config leaves it open."""


def described_mesh(config: TrainConfig, target: str, count: int) -> Mesh:
    """The config's mesh over `count` described devices."""
    devices = np.array(targets.devices(target, count), dtype=object)
    sizes = config.mesh.sizes(count)
    return Mesh(devices.reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def lower_step(config: TrainConfig, mesh: Mesh, target: str | None):
    """One optimizer step, lowered for the devices of `mesh`; target None: those of this machine."""
    state = abstract_state(config, mesh)  # before set_mesh: optax computes, and has no device there
    _, frozen = split(config, abstract_params(config, mesh))
    shape = (config.batch_size, config.task.length)
    where = NamedSharding(mesh, partition_spec(("batch", "length"), shape, mesh))
    rows = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for name, dtype in (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    }
    step = jit_train_step(config, state)
    with jax.set_mesh(mesh):
        if target is None:
            return step.lower(state, rows, frozen)
        return targets.lower(target, step, state, rows, frozen)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the compiled step takes on each device, in bytes.

    Attributes:
      weights, optimizer: of the arguments, what lies on one device; frozen weights included.
      arguments: everything that goes in.
      results: what comes out beside that: the new state takes the old one's place.
      temporaries: at the same time, at most.
      memory: of one device; None when it is not known.
      largest: (bytes on one device, shape there, name) of the largest arrays that go in.
      largest_inside: the same of the largest arrays of the compiled program.
    """

    weights: int
    optimizer: int
    arguments: int
    results: int
    temporaries: int
    memory: int | None
    largest: list[tuple[int, str, str]]
    largest_inside: list[tuple[int, str, str]]

    @property
    def peak(self) -> int:
        """All of these together."""
        return self.arguments + self.results + self.temporaries

    @property
    def fits(self) -> bool | None:
        """Whether that is less than a device has."""
        return None if self.memory is None else self.peak <= self.memory


def make_plan(config: TrainConfig, target: str, count: int, listed: int = 8) -> Plan:
    """Compiles the step of this config for `count` described devices.

    Raises:
      ValueError: sizes that do not fit the mesh, or a program that its compiler refuses (a TPU's
        does when memory is short; the message is the compiler's).
      ModuleNotFoundError: the plugin for the target is missing.
    """
    config.check_sizes(count)
    if config.model.attention is None:
        fused = FUSED[targets.TARGETS[target].platform]
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, attention=fused)
        )
    mesh = described_mesh(config, target, count)
    state = abstract_state(config, mesh)
    _, frozen = split(config, abstract_params(config, mesh))
    try:
        compiled = lower_step(config, mesh, target).compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"it does not compile for {count} x {target}: {error}") from None
    memory = compiled.memory_analysis()
    weights = list(_on_one_device((state.params, frozen), ""))
    optimizer = list(_on_one_device(state.opt_state, "optimizer"))
    return Plan(
        weights=sum(size for size, *_ in weights),
        optimizer=sum(size for size, *_ in optimizer),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        memory=targets.TARGETS[target].memory,
        largest=sorted(weights + optimizer, reverse=True)[:listed],
        largest_inside=largest_arrays(compiled.as_text(), listed),
    )


def _on_one_device(tree: Any, name: str) -> Iterable[tuple[int, str, str]]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = x.sharding.shard_shape(x.shape)
        keys = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
        label = "/".join(key for key in (name, *keys) if key)
        yield math.prod(shape) * x.dtype.itemsize, _text(x.dtype.name, shape), label


def _text(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


_ARRAY = re.compile(r"%(?P<name>[\w.-]+) = (?P<type>[a-z]+\d+)\[(?P<shape>[\d,]+)\]")
_SOURCE = re.compile(r'op_name="(?P<source>[^"]+)"')
_MADE_BY_NOBODY = re.compile(r" (parameter|get-tuple-element|tuple|bitcast|while)\(")


def largest_arrays(hlo: str, listed: int) -> list[tuple[int, str, str]]:
    """(bytes, shape, what computes it) of the largest arrays a compiled program makes.

    One of each shape; arrays within a fusion are no arrays in memory.
    """
    found, fused = {}, False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            fused = line.startswith(("%fused", "%wrapped", "%region"))
        array = _ARRAY.search(line)
        if fused or array is None or _MADE_BY_NOBODY.search(line):
            continue
        shape = [int(n) for n in array["shape"].split(",")]
        size = math.prod(shape) * max(1, int(re.sub(r"\D", "", array["type"])) // 8)
        source = _SOURCE.search(line)
        label = "/".join(source["source"].split("/")[-4:]) if source else array["name"]
        found.setdefault((size, _text(array["type"], shape)), label)
    return sorted(((*key, label) for key, label in found.items()), reverse=True)[:listed]


def show(plan: Plan, config: TrainConfig, target: str, count: int) -> None:
    """The plan as two tables."""
    console, gib = Console(highlight=False), 2**30
    verdict = {True: "it fits", False: "it does NOT fit", None: "memory unknown"}[plan.fits]
    console.print(
        f"{config.name} on {count} x {target}: {verdict}: {plan.peak / gib:.2f} GiB a device"
        + ("" if plan.memory is None else f" of {plan.memory / gib:.1f}")
    )
    for title, rows in (
        ("what takes the room, GiB a device", _summary(plan)),
        ("the largest arrays that go in", plan.largest),
        ("the largest arrays inside", plan.largest_inside),
    ):
        table = Table(title=title, show_header=False, title_justify="left")
        for size, *labels in rows:
            table.add_row(f"{size / gib:.3f}", *labels)
        console.print(table)


def _summary(plan: Plan) -> list[tuple[int, str]]:
    names = ("weights", "optimizer", "arguments", "results", "temporaries", "peak")
    return [(getattr(plan, name), name) for name in names]


def _of_command(config: TrainConfig, name: str, init: Path | None) -> TrainConfig:
    """The config that `train.finetune` would train from `init`, if one is named.

    Raises:
      ValueError: another method than the named config's, whose model is not known without a base.
    """
    if init is not None:
        return of_command(config, name, find(init).config)
    if config.method != configs.get(name).method:
        raise ValueError("--method changes the model of a base: name it with --init")
    return config


def main() -> None:
    """The command. Exit status 1 when it does not fit."""
    options = argparse.ArgumentParser(add_help=False)
    known = ", ".join(targets.TARGETS)
    options.add_argument("--target", required=True, help=f"the kind of device: {known}")
    options.add_argument("--devices", type=int, default=1, help="how many of them")
    options.add_argument("--init", type=Path, help="a model to fine-tune; its config is read only")
    options.add_argument("--output", type=Path, help="a JSON file for the figures")
    about = __doc__.splitlines()[0]
    ours, config = parse(parents=[options], description=about, needs_workdir=False)
    with command(ModuleNotFoundError):
        if ours.target not in targets.TARGETS:
            raise ValueError(f"--target {ours.target} is not described; known: {known}")
        if ours.output is not None and not ours.output.parent.is_dir():
            raise ValueError(f"--output {ours.output}: there is no folder {ours.output.parent}")
        config = _of_command(config, ours.config, ours.init)
        plan = make_plan(config, ours.target, ours.devices)
    show(plan, config, ours.target, ours.devices)
    if ours.output is not None:
        run = {"config": config.name, "target": ours.target, "devices": ours.devices}
        figures = run | dataclasses.asdict(plan) | {"peak": plan.peak, "fits": plan.fits}
        ours.output.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(plan.fits is False)


if __name__ == "__main__":
    main()
