"""Runs a model over many samples in padded batches of one shape, on the mesh, stoppable."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
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
      rows: samples per batch, a multiple of the devices that share a batch.
      stop: polled between batches.
      progress: called with (done, all) samples.
    """

    model: Transformer
    params: dict
    mesh: jax.sharding.Mesh
    rows: int = 512
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

    def _map(self, verdict, samples, total):
        verdicts, samples = [], iter(samples)
        while chunk := list(islice(samples, self.rows)):
            if self.stop():
                raise Interrupted
            missing = self.rows - len(chunk)
            stacked = jax.tree.map(lambda *rows: np.stack(rows), *chunk, *[chunk[-1]] * missing)
            one = verdict(self.model, self.params, self._place(stacked))
            verdicts.append(np.asarray(one)[: len(chunk)])
            self.progress(sum(map(len, verdicts)), total)
        return np.concatenate(verdicts)

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
