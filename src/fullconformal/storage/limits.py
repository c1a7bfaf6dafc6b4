"""What a file may ask of whoever loads it, all in one place; `docs/files.rst` says it in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on what is read, and on the memory that it makes others take."""

    #: characters of JSON
    text: int = 2**24
    #: bytes of a header: the JSON, escaped, and the places of the tensors
    header: int = 2**27
    #: characters of a string of fixed width
    word: int = 2**16
    #: axes of an array
    axes: int = 32
    #: bytes of a list without items
    list: int = 64
    #: bins of a column, and passes of a factorisation, that a transformer makes when it is fitted again
    bins: int = 2**16
    work: int = 2**10
    #: steps of a solver
    steps: int = 10**6
    #: bytes of a file that is tried before it is written
    tried: int = 2**27
    #: bytes of memory that an object of a kind, and a layer of a network, takes at least
    value: int = 2**10
    layer: int = 2**12
    #: sizes of layers that no weight bears out: kernels, strides, padding
    unproved: int = 256
    #: columns of a sparse matrix, of which no number bears out the empty ones
    sparse_columns: int = 2**22
    #: numbers in an object of a network whose training points came as a stream
    numbers: int = 2**22
    #: rows of training objects, on which a predictor is tried when it is loaded
    rows: int = 20
    #: bytes that a prediction takes at a time, whatever the file says: the default of memory_budget
    budget: int = 2**32

    def memory(self, size: int) -> int:
        """Bytes that the values in a file of so many bytes may take together; a tensor may be named many times."""
        return 2**26 + 32 * size

    def columns(self, size: int) -> int:
        """Columns that transformers in a file of so many bytes may make of those they are given.

        Each is met by a number behind, a weight or a scale, or has a name.
        """
        return max(2**16, size)

    def activations(self, numbers: int) -> int:
        """Numbers that the layers of a network may make of the objects in a file, of so many numbers in these and in its weights."""
        return 2**24 + 2**10 * numbers


LIMITS = Limits()
