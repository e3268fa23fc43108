"""SIGTERM and Ctrl-C as a request that long work polls, so that it can save before it leaves."""

import signal
import types


class Interrupt:
    """While entered, the first SIGTERM or SIGINT only sets a flag; a second SIGINT aborts.

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
        """Whether to stop soon."""
        return self.signal is not None

    def _request(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        outer = getattr(self._previous[self.signal], "__self__", None)
        if isinstance(outer, Interrupt):
            outer._request(number, frame)
