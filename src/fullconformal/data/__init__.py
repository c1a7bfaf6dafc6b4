"""Data sets: digits, synthetic points, MNIST, CIFAR-10 and ACSIncome, from files in a folder or from their publishers."""

from fullconformal.data.loaders import Dataset, load_acsincome, load_cifar10, load_digits, load_mnist, make_synthetic
from fullconformal.data.publishers import download

__all__ = ["Dataset", "download", "load_acsincome", "load_cifar10", "load_digits", "load_mnist", "make_synthetic"]
