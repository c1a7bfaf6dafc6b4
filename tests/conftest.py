"""Small matrices want one thread; two that wait for each other on a busy machine take ten times as long."""

import os

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # so that none of scikit-learn's checks is skipped

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item):
    """Networks start from the same weights, and unseeded draws are the same, in every run, whichever tests run."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def float64_by_default():
    """Torch makes float64 where nobody says otherwise."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["bf16", "tf32"])
def less_than_single(request):
    """Torch may form float32 products of fewer digits, which it does where the CPU can."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, request.param
    yield
    matmul.fp32_precision = before
