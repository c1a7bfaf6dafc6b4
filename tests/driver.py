"""A run on a cluster that takes its time, so that it can be killed; started by test_cluster.py, whose workers import it too."""

import sys
import time
import warnings

import joblib
import torch
from sklearn.datasets import make_classification
from torch import nn

from fullconformal import ConformalWarning, FullConformalClassifier

N, M, C = 256, 40, 3
X, Y = make_classification(N + M, 6, n_informative=4, n_classes=C, random_state=0)


class Pause(nn.Module):
    """Passes its input on, after a while."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def network(seconds=0.0):
    """The same weights every time, float64."""
    torch.manual_seed(0)
    return nn.Sequential(Pause(seconds), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, C)).double()


def fitted(seconds=0.0, n=N, **options):
    """A classifier fitted to the first n points."""
    options = {"prefit": True, "l2": 0.1} | options
    clf = FullConformalClassifier(network(seconds), method="influence", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)  # the weights are at no minimum
        return clf.fit(X[:n], Y[:n])


def run(seconds=0.0, **options):
    """p-values (M, C) of the last points."""
    return fitted(seconds, **options).predict_p(X[N:])


def main(address, folder, seconds):
    """The run that is killed."""
    from dask.distributed import Client

    with Client(address), joblib.parallel_config(backend="dask"):
        run(float(seconds), checkpoint=folder)


if __name__ == "__main__":
    from driver import main as by_name  # classes of a module that the workers can import

    by_name(*sys.argv[1:])
