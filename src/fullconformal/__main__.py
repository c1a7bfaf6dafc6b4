"""The command in a process of its own: the program `fullconformal`, and `python -m fullconformal`."""

import atexit
import gc
import os
import sys
import threading
from typing import NoReturn

from fullconformal.cli import main


def run() -> None:
    """Run the command, without looking for garbage among what torch, pandas and scikit-learn make when they are imported."""
    # They make half a million objects, which stay. The first look is put off until there are more; after it Python looks as usual.
    usual, put = gc.get_threshold(), gc.set_threshold
    put(750_000)
    gc.callbacks.append(lambda *_: put(*usual))
    try:
        main()
    except SystemExit as end:
        leave(end.code)


def leave(code: str | int | None) -> NoReturn:
    """End the process as Python does but for its last step, which frees all objects: a quarter of the time `predict` takes for one row.

    Processes that `multiprocessing` has forked end like this, too.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        # Nobody reads what is written any more: Python ends with 120.
        os._exit(120)
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    run()
