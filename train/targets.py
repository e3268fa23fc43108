"""Devices to compile for without having them: whole programs, their memory, their kernels.

XLA compiles for a described GPU or TPU on a machine that has neither, given the plugins of the
"aot" extra. Time and numerics need the device itself; whether a program compiles, how much memory
it takes and what its kernels use do not.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import jaxlib
from jax.experimental import topologies

# libtpu else asks a cloud's metadata server, and locks a TPU that nobody here touches.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: "cuda" or "tpu".
      plugin: the package that compiles for it.
      topology: the smallest that holds the devices asked for, by their count.
      memory: bytes of one device that a program may use.
      architecture: as ptxas names it; None for TPUs.
    """

    platform: str
    plugin: str
    topology: Callable[[int], str]
    memory: int
    description: str | None = None
    architecture: str | None = None


def _smallest(sizes: Mapping[int, str]) -> Callable[[int], str]:
    """By the devices asked for, the first topology that holds them."""

    def topology(count: int) -> str:
        fitting = [name for size, name in sizes.items() if count <= size]
        if not fitting:
            raise ValueError(f"{count} devices: topologies are described up to {max(sizes)}")
        return fitting[0]

    return topology


_V5E = {4: "v5e:2x2", 16: "v5e:4x4", 128: "v5e:8x16"}
_V5P = {4: "v5p:2x2x1", 16: "v5p:2x2x4", 32: "v5p:2x4x4", 64: "v5p:4x4x4"}
GIB = 2**30
TARGETS = {
    # XLA leaves itself a quarter of a GPU unless it is told otherwise (its "memory fraction").
    "h200": Target(
        "cuda", "jax_cuda13_plugin", lambda n: f"1x{n}x1", 112_500_000_000, _H200, "sm_90a"
    ),
    "v5e": Target("tpu", "libtpu", _smallest(_V5E), int(15.75 * GIB)),
    "v5p": Target("tpu", "libtpu", _smallest(_V5P), int(95.74 * GIB)),
}


class NoReportError(RuntimeError):
    """What it takes to look into compiled kernels is missing; not that they do not compile."""


def devices(name: str, count: int = 1) -> Sequence[jax.Device]:
    """`count` described devices of this kind.

    Raises:
      ModuleNotFoundError: the plugin is missing; names the extra that brings it.
    """
    target = TARGETS[name]
    if importlib.util.find_spec(target.plugin) is None:
        raise ModuleNotFoundError(
            f'compiling for {name} needs {target.plugin}: pip install "tape-jax[aot]"'
        )
    shape = target.topology(count)
    if target.platform == "cuda":
        where = {"topology_name": "", "topology": shape, "target_config": target.description}
    else:
        where = {"topology_name": shape}
    topology = topologies.get_topology_desc(platform=target.platform, **where)
    return topology.devices[:count]


def lower(name: str, function: Callable, *arguments):
    """A function, jitted if it is not yet, lowered for arguments sharded over `devices(name)`."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with contextlib.ExitStack() as stack:
        on_gpu = TARGETS[name].platform == "cuda" and hasattr(jax.sharding, "AbstractDevice")
        if on_gpu and jax.sharding.get_abstract_mesh().empty:
            # From jax 0.11 on Pallas asks the mesh at hand which GPU it lowers for.
            device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        return jitted.trace(*arguments).lower()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one compiled kernel uses.

    Attributes:
      registers: per thread.
      spilled: bytes per thread that did not fit into registers.
      serialized: ptxas could not let products run asynchronously (its warnings C7510 and on).
      shared_memory: bytes per block.
      wgmma, mma: tensor-core instructions in the code, of Hopper's kind and of the older one.
    """

    registers: int
    spilled: int
    serialized: bool
    shared_memory: int
    wgmma: int
    mma: int


def kernels(name: str, lowered, prefix: str) -> dict[str, Kernel]:
    """Compiles for a GPU and reports the kernels whose names start with `prefix`.

    Raises:
      NoReportError: no ptxas, or a jaxlib that does not dump PTX (0.12).
    """
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_backend_optimization_level": 3,  # the default, whatever XLA_FLAGS says
            }
        )
        dumped = pathlib.Path(folder)
        thunks = "\n".join(p.read_text() for p in dumped.glob("*thunk_sequence.txt"))
        shared = dict(re.findall(rf"({prefix}\w*) grid.*shared_memory: (\d+) bytes", thunks))
        found, assembly = {}, list(dumped.glob("*.ptx"))
        if not assembly:
            raise NoReportError(f"jaxlib {jaxlib.__version__} dumped no PTX to look into")
        for path in assembly:
            entries = re.split(rf"\.entry (?={prefix})", path.read_text())[1:]
            code = {entry.split("(")[0]: entry.split(".entry ")[0] for entry in entries}
            for kernel, report in _ptxas(path, TARGETS[name].architecture).items() if code else ():
                if kernel in code:
                    found[kernel] = Kernel(
                        **report,
                        shared_memory=int(shared[kernel]),
                        wgmma=code[kernel].count("wgmma.mma_async"),
                        mma=code[kernel].count("mma.sync"),
                    )
    return found


def _ptxas(path, architecture):
    """{kernel: registers, spilled bytes, serialized} as `ptxas -v` says."""
    command = [_find_ptxas(), "-v", f"-arch={architecture}", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pattern = (
        r"Compiling entry function '(\w+)'(?:.*\n)*?"
        r".*?(\d+) bytes spill stores(?:.*\n)*?.*?Used (\d+) registers"
    )
    return {
        kernel: {
            "registers": int(registers),
            "spilled": int(spilled),
            "serialized": bool(re.search(rf"wgmma.*serialized.*'{kernel}'", said)),
        }
        for kernel, spilled, registers in re.findall(pattern, said)
    }


def _find_ptxas() -> str:
    spec = importlib.util.find_spec("nvidia")  # where nvidia-cuda-nvcc puts its programs
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if found := shutil.which("ptxas", path=str(pathlib.Path(folder) / "cu13/bin")):
            return found
    if found := shutil.which("ptxas"):
        return found
    raise NoReportError('no ptxas: pip install "tape-jax[aot]", or put one on PATH')
