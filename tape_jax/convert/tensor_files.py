"""safetensors files, read and written piece by piece.

The format is a length, a JSON header and the numbers. The safetensors library maps a whole file
into memory and writes a whole file at once; here memory never holds more than one tensor.
Format: https://github.com/huggingface/safetensors#format.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tape_jax.convert.source import Index, Source

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Their names of dtypes. The eight-bit floats are not here: they mean nothing without scales."""

INDEX = "model.safetensors.index.json"
Track = Callable[[Sequence[Any]], Iterable[Any]]
"""What wraps a sequence that takes long, for a progress bar."""

_BLOCK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, from byte `offset` on."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index = ()) -> np.ndarray:
        """A copy of this part: blocks of whole rows are read, and cut."""
        shape = self.shape or (1,)
        cuts = (*index, *(slice(None) for _ in shape[len(index) :]))
        sizes = [len(range(*cut.indices(n))) for cut, n in zip(cuts, shape, strict=True)]
        found = _aligned(sizes, self.dtype)
        first, inner = cuts[0].indices(shape[0])[0], math.prod(shape[1:])
        rows = max(1, _BLOCK_BYTES // max(1, inner * self.dtype.itemsize))
        with open(self.file, "rb") as file:
            file.seek(self.offset + first * inner * self.dtype.itemsize)
            for row in range(0, sizes[0], rows):
                count = min(rows, sizes[0] - row)
                block = np.fromfile(file, self.dtype, count * inner).reshape(count, *shape[1:])
                found[row : row + count] = block[(slice(None), *cuts[1:])]
        return found if self.shape else found[0]


def _aligned(shape, dtype) -> np.ndarray:
    """An empty array at an address that jax on a CPU can take over without a copy."""
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def open_file(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata. Reads the header only.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is cut off or is no such file; names the file, and the tensor it ends in.
    """
    size = file.stat().st_size
    header, start = _read_header(file, size)
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}; read are {known}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{file}: {name} of shape {shape} cannot have {end - begin} bytes")
        if end > size:
            raise ValueError(f"{file} is cut off: {name} ends at byte {end}, the file at {size}")
        tensors[name] = Stored(file, begin, shape, dtype)
    return tensors, metadata


def _read_header(file: Path, size: int) -> tuple[dict[str, Any], int]:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        start = 8 + length
        if start > size:
            raise ValueError(f"{file} is cut off, or no safetensors file: it has {size} bytes, its"
                             f" header would end at {start}")  # fmt: skip
        try:
            return json.loads(opened.read(length)), start
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file: its header is not JSON") from error


def open_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint, in one file or in those that its index names.

    Raises:
      FileNotFoundError: no weights there, or a shard is missing.
      ValueError: a damaged file, or an index that does not fit its files.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return open_file(single)[0]
    if not index.exists():
        raise FileNotFoundError(
            f"{folder} has neither {single.name} nor {INDEX}: weights in another format"
            " (pytorch_model.bin) become that with transformers' model.save_pretrained(folder)"
        )
    homes, tensors = json.loads(index.read_text())["weight_map"], {}
    for shard in sorted(set(homes.values())):
        if not (folder / shard).exists():
            names = [name for name, home in homes.items() if home == shard]
            raise FileNotFoundError(
                f"{folder / shard} is missing: {INDEX} expects {len(names)} tensors in it,"
                f" {names[0]} among them"
            )
        held, _ = open_file(folder / shard)
        _check_index(folder / shard, held, {name for name, at in homes.items() if at == shard})
        tensors |= held
    return tensors


def _check_index(file: Path, held: Mapping[str, Stored], indexed: set[str]) -> None:
    for name in sorted(indexed - held.keys()):
        raise ValueError(f"{file} lacks {name}, which {INDEX} says it has")
    for name in sorted(held.keys() - indexed):
        raise ValueError(f"{file} has {name}, which {INDEX} does not name")


def write_file(
    file: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str],
    track: Track = iter,
) -> None:
    """Writes a safetensors file, one tensor in memory at a time; `track` wraps their names.

    Raises:
      ValueError: a dtype that the format has no name for.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in codes:
            raise ValueError(f"{name} has dtype {tensor.dtype}; safetensors has {list(codes)}")
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in track(list(tensors)):
            tensor = tensors[name]
            opened.write(np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8).data)


def write_folder(
    folder: Path, tensors: Mapping[str, Source], shard_bytes: int, track: Track = iter
) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (or one tensor) and an index."""
    shards, sizes = [{}], [0]
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if sizes[-1] and sizes[-1] + size > shard_bytes:
            shards.append({}), sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += size
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], {"format": "pt"}, track)
        return
    homes = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard, {"format": "pt"}, track)
        homes |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": homes}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
