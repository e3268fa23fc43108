"""Parameters from a checkpoint's tensors: planned from their shapes, then filled one by one."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tape_jax import positions
from tape_jax.config import ModelConfig
from tape_jax.convert.names import EMBEDDING, HEAD, Conversion, find
from tape_jax.convert.source import Source
from tape_jax.convert.start import parameter_shapes, plan_shardings, start_missing
from tape_jax.convert.tensor_files import Track
from tape_jax.positions.additive import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Step:
    """One tensor on its way: `source`, converted, becomes the part at `index` of `path`."""

    source: Source
    conversion: Conversion
    path: str
    index: tuple[int, ...]


def load_params(
    config: ModelConfig,
    sources: Mapping[str, Source],
    *,
    mesh: jax.sharding.Mesh | None = None,
    seed: int = 0,
    new_position: bool = False,
    track: Track = iter,
) -> dict:
    """Float32 parameters of this model from tensors under their Hugging Face names.

    Host memory beside the parameters: one tensor.

    Args:
      config: the model.
      sources: the tensors, in the order in which they are best read.
      mesh: where the parameters go, as `parameter_shardings` plans; the default device when None.
      seed: of the parameters that no checkpoint has.
      new_position: whether the encoding is new to the checkpoint: what it learns then starts from
        the seed unless it is there. LoRA's factors always do.
      track: wraps the steps, for a progress bar.

    Raises:
      ValueError: tensors that do not fit; every missing, superfluous and misshapen one is listed,
        before any is read.
    """
    shapes = parameter_shapes(config)
    steps, problems = _plan(config, sources, shapes)
    filled: dict[str, set] = {}
    for step in steps:
        filled.setdefault(step.path, set()).add(step.index)
    new = [path for path in shapes if path not in filled and _startable(path, new_position)]
    for path in shapes.keys() - set(new):
        problems += _missing(path, shapes[path].shape, filled.get(path))
    _refuse(problems)
    _refuse(list(_differing(config, sources)))
    wanted = {path: shapes[path] for path in filled}
    params = _fill(wanted, plan_shardings(wanted, mesh), steps, track)
    return unflatten_dict(params | start_missing(config, new, mesh=mesh, seed=seed), sep="/")


def _refuse(problems):
    if problems:
        raise ValueError("checkpoint does not fit its config:\n  " + "\n  ".join(sorted(problems)))


def _startable(path, new_position):
    *parents, leaf = path.split("/")
    return leaf in ("lora_a", "lora_b") or (new_position and "position" in parents)


# --- What the shapes tell -------------------------------------------------------------------------


def _plan(config, sources, shapes) -> tuple[list[Step], list[str]]:
    steps, problems = [], []
    for name, source in sources.items():
        if _constant(name) or (name == HEAD and config.tie_embeddings):
            continue
        rule, index = find(name) or (None, ())
        if rule is None or rule.ours not in shapes or index[:1] >= (config.num_layers,):
            problems.append(f"unexpected: {name} has no place in this model")
            continue
        whole, path = shapes[rule.ours].shape, rule.ours
        if any(i >= size for i, size in zip(index, whole, strict=False)):
            problems.append(f"shape: {name} is one too many for {path}, which is {whole}")
            continue
        want = _their_shape(rule.conversion, whole[len(index) :])
        if source.shape != want:
            problems.append(f"shape: {name} gives {source.shape} for {path}, expected {want}")
        else:
            steps.append(Step(source, rule.conversion, path, index))
    return steps, problems


def _their_shape(conversion, ours):
    try:
        return conversion.their_shape(ours)
    except (TypeError, ValueError):  # of a rank that this conversion has no sense for
        return ours


def _missing(path, shape, have) -> list[str]:
    if have is None:
        return [f"missing: nothing fills {path}"]
    grid = np.ndindex(shape[: len(next(iter(have)))])
    absent = sorted({index[0] for index in grid if index not in have})
    return [f"missing: {path} has no tensor for layers {absent}"] if absent else []


# --- What the numbers tell ------------------------------------------------------------------------


def _differing(config, sources) -> Iterator[str]:
    """A line for every tensor that repeats something else, and wrongly."""
    for name, source in sources.items():
        if check := _constant(name):
            yield from check(config, name, source.read())
    if config.tie_embeddings and HEAD in sources and not _equal(sources[EMBEDDING], sources[HEAD]):
        yield f"unexpected: {HEAD} differs from the embedding it should be tied to"


def _equal(a: Source, b: Source, rows: int = 1024) -> bool:
    blocks = ((slice(row, row + rows),) for row in range(0, a.shape[0], rows))
    return a.shape == b.shape and all(np.array_equal(a.read(i), b.read(i)) for i in blocks)


def _check_frequencies(config, name, tensor):
    """Stored frequencies say nothing new unless they are not the config's: then that is an error.

    The tolerance lets through tables that were rounded to bfloat16 or float16 with the model.
    """
    base = getattr(config.position, "base", None)
    want = None if base is None else positions.frequencies(config.head_width, base)
    if want is None or tensor.shape != want.shape or not np.allclose(tensor, want, 1e-2, 1e-7):
        yield f"unexpected: {name} does not hold the frequencies of base {base}"


def _check_slopes(config, name, tensor):
    """The official ALiBi keeps slope_h * j for every head and position in its state dict."""
    slopes = alibi_slopes(config.num_heads)
    want = slopes[:, None] * np.arange(tensor.shape[-1])
    fits = tensor.size == want.size and np.allclose(tensor.reshape(want.shape), want, 1e-2)
    if not fits or not isinstance(config.position, positions.ALiBi):
        yield f"unexpected: {name} does not hold the slopes of {config.num_heads} heads"


def _check_threshold(config, name, tensor):
    """The official FIRE keeps its first threshold as a constant."""
    threshold = getattr(config.position, "threshold", None)
    if threshold is None or tensor != threshold:
        yield f"unexpected: {name} is {tensor}, and position.threshold={threshold}"


_CONSTANTS = {
    "rotary_emb.inv_freq": _check_frequencies,
    "self_attn.alibi": _check_slopes,
    "rotary_emb.init_L": _check_threshold,
}
"""End of the name of a tensor that follows from the config -> its check."""


def _constant(name):
    return next((check for end, check in _CONSTANTS.items() if name.endswith(end)), None)


# --- The filling ----------------------------------------------------------------------------------


def _fill(shapes, shardings, steps, track) -> dict[str, Array]:
    """Zeros of these shapes, with every step's tensor written into them."""

    def zeros():
        return {path: jnp.zeros(x.shape, jnp.float32) for path, x in shapes.items()}

    params = jax.jit(zeros, out_shardings=shardings)()
    for step in track(steps):
        target = params.pop(step.path)
        write = _writer(target.sharding, step.conversion)
        index = tuple(map(np.int32, step.index))
        # Waited for, so that no more than one tensor is underway.
        params[step.path] = jax.block_until_ready(write(target, _put(step, target), index))
    return params


def _put(step, target) -> Array:
    """The tensor on the devices in its own dtype, over a mesh cut as its target is."""
    source, sharding = step.source, target.sharding
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(_numbers(source.read()))
    spec = step.conversion.cut(sharding.spec[len(step.index) :])
    pieces = functools.cache(lambda cuts: _numbers(source.read(tuple(slice(*c) for c in cuts))))

    def piece(index):
        return pieces(tuple(cut.indices(n) for cut, n in zip(index, source.shape, strict=True)))

    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec[: len(source.shape)]))
    return jax.make_array_from_callback(source.shape, sharding, piece)


def _numbers(array: np.ndarray) -> np.ndarray:
    """In a dtype that devices have: float64 is not among them."""
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


@functools.cache
def _writer(sharding, conversion):
    """The compiled write of one tensor into one layer of its parameter, in place."""

    def write(target, raw, index):
        value = conversion.forward(raw.astype(target.dtype))
        start = (*index, *(0,) * value.ndim)
        layer = value.reshape((1,) * len(index) + value.shape)
        return jax.lax.dynamic_update_slice(target, layer, start)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
