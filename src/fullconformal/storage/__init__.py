"""Saved predictors: objects as safetensors and JSON, never pickle."""

from fullconformal.storage.container import StorageError, one_line
from fullconformal.storage.values import expect, require, savable

__all__ = ["StorageError", "expect", "one_line", "require", "savable"]
