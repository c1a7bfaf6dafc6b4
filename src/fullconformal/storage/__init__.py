"""Saved predictors: objects as safetensors and JSON, never pickle."""

from fullconformal.runtime.files import one_line
from fullconformal.storage.container import StorageError
from fullconformal.storage.limits import LIMITS
from fullconformal.storage.values import (
    budget,
    check_fields,
    conforms,
    defaults,
    expect,
    hints_of,
    parameters,
    printable,
    require,
    savable,
)

__all__ = [
    "LIMITS",
    "StorageError", "budget", "check_fields", "conforms",
    "defaults", "expect", "hints_of", "one_line", "parameters", "printable", "require", "savable",
]  # fmt: skip
