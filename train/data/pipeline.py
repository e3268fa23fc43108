"""From a source of samples to global device batches, through a checkpointable grain iterator."""

import dataclasses

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from tape_jax.sharding import partition_spec
from train.data.task import Sample, Source


@dataclasses.dataclass(frozen=True)
class HostRows:
    """This process's rows of every global batch, in the order of the whole.

    Global batch s is samples [s * batch, (s + 1) * batch) whatever the number of processes, and
    process p holds the p-th part of it: a run can continue on another number of hosts.
    """

    source: Source
    batch: int
    process: int
    processes: int

    def __len__(self) -> int:
        """Rows this process will see."""
        return len(self.source) // self.processes

    def __getitem__(self, row: int) -> Sample:
        """The sample behind local row `row`."""
        local = self.batch // self.processes
        step, place = divmod(int(row), local)
        return self.source[step * self.batch + self.process * local + place]


def batches(source: Source, batch_size: int) -> grain.DatasetIterator:
    """An iterator over this process's share of the global batches; its state is a step count."""
    rows = HostRows(source, batch_size, jax.process_index(), jax.process_count())
    local = batch_size // jax.process_count()
    dataset = grain.MapDataset.source(rows).batch(local)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(dataset.to_iter_dataset(options))


def to_device(batch: Sample, mesh: jax.sharding.Mesh, vocab_size: int) -> dict[str, jax.Array]:
    """The global batch as arrays sharded over batch and length.

    Raises:
      ValueError: token ids that the model's embedding does not hold.
    """
    high = max(int(batch["tokens"].max()), int(batch["targets"].max()))
    if high >= vocab_size or int(batch["tokens"].min()) < 0:
        raise ValueError(
            f"the data holds token id {high}, but model.vocab_size={vocab_size}: the tokenizer and"
            " the model do not fit"
        )

    def place(x: np.ndarray) -> jax.Array:
        whole = (x.shape[0] * jax.process_count(), *x.shape[1:])
        sharding = NamedSharding(mesh, partition_spec(("batch", "length"), whole, mesh))
        return jax.make_array_from_process_local_data(sharding, x, whole)

    return jax.tree.map(place, batch)
