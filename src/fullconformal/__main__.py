"""The command in a process of its own: the program `fullconformal`, and `python -m fullconformal`."""

import atexit
import gc

from fullconformal.cli import main


def run() -> None:
    """Run the command, without looking for garbage among what torch, pandas and scikit-learn make when they are imported."""
    # They make a third of a million objects, which stay. The first look is put off until there are more; after it Python looks as usual.
    usual, put = gc.get_threshold(), gc.set_threshold
    put(500_000)
    gc.callbacks.append(lambda *_: put(*usual))
    # At its end Python would look through them all, too, a quarter of the time that `predict` takes for one row. What is registered first
    # is called last.
    atexit.register(gc.freeze)
    main()


if __name__ == "__main__":
    run()
