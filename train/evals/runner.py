"""Runs a model over many samples in padded batches of one shape, on the mesh, stoppable."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from tape_jax import Transformer
from tape_jax.sharding import constrain, partition_spec
from train.data.task import Sample, Stop


class Interrupted(Exception):
    """The evaluation was asked to stop before it was done."""


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A model with its parameters, ready to score samples.

    Attributes:
      tokens_per_device: in a batch at most, if a single sample is not longer; every one of them
        has a logit for each word of the vocabulary.
      stop: polled between batches.
      progress: called with (done, all) samples.
    """

    model: Transformer
    params: dict
    mesh: jax.sharding.Mesh
    tokens_per_device: int = 2**14
    stop: Stop = lambda: False
    progress: Callable[[int, int], None] = lambda done, total: None

    def exact_matches(self, samples: Iterable[Sample], total: int) -> np.ndarray:
        """For each sample, whether greedy decoding from its prompt writes all scored targets.

        One forward pass decides it: greedy decoding writes the targets exactly if and only if, at
        every scored place, the most likely token after the *right* prefix is the right one.

        Raises:
          Interrupted: `stop` said so.
        """
        return self._map(_exact_matches, samples, total)

    def hits(self, samples: Iterable[Sample], total: int) -> np.ndarray:
        """Whether the most likely token is the target, (total, N); true where nothing is scored.

        Raises:
          Interrupted: `stop` said so.
        """
        return self._map(_hits, samples, total)

    def losses(self, samples: Iterable[Sample], total: int) -> np.ndarray:
        """Negative log likelihood of every target in nats, (total, N); 0 where nothing is scored.

        Raises:
          Interrupted: `stop` said so.
        """
        return self._map(_losses, samples, total)

    def stream_losses(self, samples: Iterable[Sample], total: int) -> Iterator[np.ndarray]:
        """The rows (N,) of `losses` one by one, for samples whose losses are too many to keep.

        Raises:
          Interrupted: `stop` said so.
        """
        return itertools.chain.from_iterable(self._batches(_losses, samples, total))

    def _map(self, verdict, samples, total):
        return np.concatenate(list(self._batches(verdict, samples, total)))

    def _batches(self, verdict, samples, total):
        done, samples = 0, iter(samples)
        first = list(islice(samples, 1))
        rows = self._rows(len(first[0]["tokens"]), total) if first else 1
        samples = itertools.chain(first, samples)
        while chunk := list(islice(samples, rows)):
            if self.stop():
                raise Interrupted
            missing = rows - len(chunk)
            stacked = jax.tree.map(lambda *rows: np.stack(rows), *chunk, *[chunk[-1]] * missing)
            one = verdict(self.model, self.params, self._place(stacked))
            yield np.asarray(one)[: len(chunk)]
            done += len(chunk)
            self.progress(done, total)

    def _rows(self, length: int, total: int) -> int:
        """Samples of a batch: as many on every device that shares it, no more than there are."""
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        return shards * min(max(1, self.tokens_per_device // length), -(-total // shards))

    def _place(self, batch):
        def place(x):
            spec = partition_spec(("batch", None), x.shape, self.mesh)
            return jax.make_array_from_callback(
                x.shape, NamedSharding(self.mesh, spec), lambda index: x[index]
            )

        return jax.tree.map(place, batch)


@functools.partial(jax.jit, static_argnames="model")
def _exact_matches(model, params, batch):
    return constrain(_right(model, params, batch).all(axis=-1), None)  # whole on every host


@functools.partial(jax.jit, static_argnames="model")
def _hits(model, params, batch):
    return constrain(_right(model, params, batch), None, None)


@functools.partial(jax.jit, static_argnames="model")
def _losses(model, params, batch):
    logits = model.apply({"params": params}, batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return constrain(losses * batch["weights"], None, None)


def _right(model, params, batch):
    logits = model.apply({"params": params}, batch["tokens"])
    return (logits.argmax(-1) == batch["targets"]) | (batch["weights"] == 0)
