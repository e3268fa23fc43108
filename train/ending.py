"""How commands end: what a user can mend is one line and an exit status, not a traceback."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def command(*failures: type[Exception]) -> Iterator[None]:
    """Within it a command does its work, and logs plain lines.

    Exit status 1 for bad input (ValueError, OSError) and the `failures`, with their message; 130,
    which shells know as Ctrl-C, for a KeyboardInterrupt.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    try:
        yield
    except (ValueError, OSError, *failures) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
