"""Small matrices want one thread; two that wait for each other on a busy machine take ten times as long."""

import os

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # so that none of scikit-learn's checks is skipped

import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item):
    """Networks start from the same weights in every run, whichever tests run."""
    torch.manual_seed(0)
