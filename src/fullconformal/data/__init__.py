"""Data sets: digits, synthetic, MNIST, CIFAR-10, ACSIncome; from files in a folder, or fetched from their publishers."""

from fullconformal.data.base import Dataset
from fullconformal.data.images import load_cifar10, load_mnist
from fullconformal.data.publishers import download
from fullconformal.data.tables import load_acsincome, load_digits, make_synthetic

__all__ = ["Dataset", "download", "load_acsincome", "load_cifar10", "load_digits", "load_mnist", "make_synthetic"]
