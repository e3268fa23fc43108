"""SIGTERM and Ctrl-C as a request that long work polls, so that it can save before it leaves."""

import signal
import types

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather


class Interrupt:
    """While entered, the first SIGTERM or SIGINT only sets a flag; a second SIGINT aborts.

    A signal to one of several processes that were joined (`train.hosts`) stops all of them at the
    same step; each question then waits for the devices. (JAX's own agreement, made for training
    steps, is asked by Orbax with other numbers, and knows no evaluations.)

    One that is entered within another passes the request on: what it was part of stops as well.
    """

    def __init__(self):
        """Nothing requested yet."""
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        """Takes the two signals over."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether to stop soon. Processes of one run ask together, and are told the same."""
        if jax.distributed.is_initialized():
            # What still runs may talk between processes too, and on CPUs the two would mix.
            jax.block_until_ready(jax.live_arrays())
            told = process_allgather(np.int32(self.signal or 0))
            if self.signal is None and told.any():
                self.signal = signal.Signals(told.max())
        return self.signal is not None

    def _request(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        outer = getattr(self._previous[self.signal], "__self__", None)
        if isinstance(outer, Interrupt):
            outer._request(number, frame)
