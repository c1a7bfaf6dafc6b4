"""
Prediction sets of a ResNet-18 on CIFAR-10
==========================================

Every image trains and calibrates, in two ways. Folds: a network is trained without each of K folds, and an image is scored by the one that
has not seen it; any classifier with ``predict_proba`` will do, so here it trains itself. Influence functions: one network, and the
curvature of its eleven million parameters by that of the last layer alone, or by EKFAC, which takes each layer's to be a Kronecker product
with corrected eigenvalues. All are put beside split CP with a network that was trained for as many steps on four fifths of the images, on
the whole test set.

    python examples/resnet_cifar.py --data FOLDER
    python examples/resnet_cifar.py --data FOLDER --methods split folds5 folds10

FOLDER holds the six files of CIFAR-10's binary version (`fullconformal data cifar10 --folder FOLDER --download`), or parts
``train*.npz`` and ``test*.npz`` with arrays X (n, 3, 32, 32) of uint8 and y (n,). On one recent GPU it takes some minutes.

With ``--out`` what is done is written as it is done: p-values of ``--part`` test images at a time, and the figures of those so far. With
``--networks`` the trained networks are kept. The same command, started again, goes on where it was stopped; ``--methods`` takes the
methods one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import nn
from torch.nn.functional import cross_entropy, pad

from fullconformal import FullConformalClassifier, metrics
from fullconformal.data import load_cifar10
from fullconformal.pvalues import count, p_values
from fullconformal.sets import prediction_sets

EPSILONS = (0.05, 0.1, 0.2)
WEIGHT_DECAY = 5e-4


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, i, o, stride):
        super().__init__()
        self.through = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(),
            nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o),
        )  # fmt: skip
        around = i != o or stride > 1
        self.around = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if around else nn.Identity()
        )

    def forward(self, x):
        return torch.relu(self.through(x) + self.around(x))


def resnet18(width=64, n_classes=10):
    """ResNet-18 for images of 32×32, as one chain that ends in a linear layer; 11,173,962 parameters at width 64."""
    steps = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    i = width
    for level in range(4):
        o = width * 2**level
        steps += [Block(i, o, 1 if level == 0 else 2), Block(o, o, 1)]
        i = o
    return nn.Sequential(*steps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, n_classes))


def load(folder):
    """Training and test images as uint8 arrays with their labels."""
    parts = {kind: sorted(Path(folder).glob(f"{kind}*.npz")) for kind in ("train", "test")}
    if not parts["train"]:
        data = load_cifar10(folder)
        return data.X, data.y, data.X_test, data.y_test
    opened = {kind: [np.load(path, allow_pickle=False) for path in paths] for kind, paths in parts.items()}
    return tuple(np.concatenate([part[key] for part in opened[kind]]) for kind in opened for key in ("X", "y"))


def to_images(X, device):
    """Pixels as float32 in [0, 1] on a device."""
    return torch.as_tensor(X, device=device).float().view(-1, 3, 32, 32) / 255


def scale_of(images):
    """Mean and deviation (1, 3, 1, 1) of each channel."""
    return images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)


def moved(images, generator):
    """Images shifted by up to four pixels, every other one mirrored."""
    k, size = len(images), images.shape[-1]
    padded = pad(images, (4, 4, 4, 4), mode="reflect")
    dx, dy = (torch.randint(9, (k, 1, 1, 1), generator=generator, device=images.device) for _ in range(2))
    at = torch.arange(size, device=images.device)
    mirrored = torch.rand(k, 1, 1, 1, generator=generator, device=images.device) < 0.5
    columns = torch.where(mirrored, at.flip(0), at) + dx
    rows = at.view(1, 1, -1, 1) + dy
    batch = torch.arange(k, device=images.device).view(-1, 1, 1, 1)
    return padded[batch, torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1), rows, columns]


def train(model, X, y, steps, batch, seed, label):
    """SGD with momentum, one cycle of the learning rate."""
    device = X.device
    generator = torch.Generator(device).manual_seed(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=WEIGHT_DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=steps, pct_start=0.25)
    model.train()
    order, done, start = torch.empty(0, dtype=torch.long, device=device), 0, time.perf_counter()
    while done < steps:
        if len(order) < batch:
            order = torch.randperm(len(y), generator=generator, device=device)
        index, order = order[:batch], order[batch:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(model(moved(X[index], generator)), y[index])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        schedule.step()
        done += 1
        if done % max(1, steps // 5) == 0:
            print(
                f"  {label}: step {done} of {steps}, loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model


def trained(args, name, X, y, steps):
    """A network in eval mode and the seconds its training took: from the folder of networks where it is there, else trained and kept."""
    torch.manual_seed(args.seed)
    model, start = resnet18(args.width).to(args.device), time.perf_counter()
    file = (
        args.networks
        and Path(args.networks) / f"{name}_{args.width}_{len(y)}_{steps}_{args.batch}_{args.seed}.safetensors"
    )
    if file and file.exists():
        state = load_file(file, device=str(args.device))
        seconds = float(state.pop("seconds"))
        model.load_state_dict(state)
    else:
        train(model, X, y, steps, min(args.batch, len(y)), args.seed, name)
        seconds = time.perf_counter() - start
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({**model.state_dict(), "seconds": torch.tensor(seconds)}, file)
    # Scales and shifts of the normalisation (9,600 numbers) are taken as constants from here on.
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return model.eval(), seconds


@torch.no_grad()
def log_proba(model, X):
    """Log-probabilities (k, C) in float64."""
    return torch.cat([torch.log_softmax(model(part).double(), -1) for part in X.split(1000)]).cpu().numpy()


class ResNet(ClassifierMixin, BaseEstimator):
    """The same training behind scikit-learn's verbs, which is all that folds need; images are rows of numbers."""

    took = []  # noqa: RUF012 seconds of every training, of all objects: scikit-learn makes copies of them

    def __init__(self, args=None, steps=1):
        self.args, self.steps = args, steps

    def fit(self, X, y):
        images, self.classes_ = to_images(X, self.args.device), np.unique(y)
        self.scale_ = mean, std = scale_of(images)
        name = f"fold_{hashlib.sha256(np.ascontiguousarray(X[:, ::64])).hexdigest()[:12]}"
        labels = torch.as_tensor(np.searchsorted(self.classes_, y), device=self.args.device)
        self.network_, seconds = trained(self.args, name, (images - mean) / std, labels, self.steps)
        self.took.append(seconds)
        return self

    def predict_proba(self, X):
        mean, std = self.scale_
        images = to_images(X, self.args.device)
        return np.exp(log_proba(self.network_, (images - mean) / std))[:, : len(self.classes_)]


def folds(args, results, name, X, y, X_test, steps):
    """p-values by K folds, as the method's name says."""
    ResNet.took.clear()
    X, X_test, start = X.reshape(len(X), -1), X_test.reshape(len(X_test), -1), time.perf_counter()
    clf = FullConformalClassifier(
        ResNet(args, steps), method="folds", folds=int(name.removeprefix("folds")), random_state=args.seed
    ).fit(X, y)
    middle = time.perf_counter()
    results.p[name][:] = clf.predict_p(X_test)
    end, training = time.perf_counter(), sum(ResNet.took)
    seen = {
        "training_seconds": round(training, 3),
        "trainings": len(ResNet.took),
        "predict_p_seconds": round(end - middle, 3),
    }
    results.note(
        name, fit_seconds=round(middle - start, 3), **seen, accuracy=float((clf.predict(X_test) == results.y).mean())
    )
    print(f"{name}: {seen}, all {(end - start) / training:.3f} times the trainings", flush=True)


def split_p(model, X, y, X_test):
    """p-values (m, C) of split CP with the log loss, from calibration points the network has not seen."""
    scores = -log_proba(model, X)[np.arange(len(y)), y.cpu().numpy()]
    tau = -log_proba(model, X_test)
    greater, equal = (np.empty_like(tau) for _ in range(2))
    for at in range(0, len(tau), 1000):
        rows = slice(at, at + 1000)
        greater[rows], equal[rows] = count(scores[:, None, None], tau[rows])
    return p_values(greater, equal, len(scores))


def figures(p, y):
    """Print coverage and sizes of p-values (k, C), and return them."""
    row, words = {"test_points": len(y), "size_auc": list(metrics.size_auc(p))}, []
    for epsilon in EPSILONS:
        sets = prediction_sets(p, 1 - epsilon)
        covered, size = metrics.coverage(sets, y), metrics.mean_size(sets)
        row[f"coverage at {epsilon}"], row[f"size at {epsilon}"] = list(covered), list(size)
        words.append(
            f"ε = {epsilon}: coverage {covered.value:.4f} ± {covered.se:.4f}, size {size.value:.3f} ± {size.se:.3f}"
        )
    print("  " + "; ".join(words), flush=True)
    return row


class Results:
    """Rows by method and p-values (m, C), not a number where they are still to come; kept in a file and one beside it."""

    def __init__(self, args, y):
        self.file, self.y, self.rows, self.p = args.out and Path(args.out), y, {}, {}
        same = ("epochs", "batch", "width", "n_train", "n_test", "damping", "seed")
        self.arguments = {key: getattr(args, key) for key in same}
        self.device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        if self.file and self.file.exists():
            before = json.loads(self.file.read_text())
            if before["arguments"] != self.arguments:
                raise SystemExit(f"{self.file} holds results of {before['arguments']}; give another --out.")
            self.rows = {row["method"]: row for row in before["rows"]}
            with np.load(self.file.with_suffix(".npz"), allow_pickle=False) as arrays:
                self.p = {name: arrays[name].astype(np.float64) for name in arrays.files if name != "y"}

    def todo(self, name):
        """Positions of the test points that are still to come."""
        self.p.setdefault(name, np.full((len(self.y), 10), np.nan))
        return np.isnan(self.p[name][:, 0]).nonzero()[0]

    def note(self, name, **what):
        """Add to the row of a method, and keep all."""
        self.rows[name] = {"method": name, **self.rows.get(name, {}), **what}
        done = ~np.isnan(self.p[name][:, 0])
        if done.any():
            self.rows[name] |= figures(self.p[name][done], self.y[done])
        if self.file:
            arrays = {key: value.astype(np.float32) for key, value in self.p.items()}
            rows = list(self.rows.values())
            text = json.dumps({"device": self.device, "arguments": self.arguments, "rows": rows}, indent=1)
            # Written apart and then put in place, so that a run killed meanwhile leaves what was there.
            apart = self.file.with_name("unfinished.npz")
            np.savez_compressed(apart, **arrays, y=self.y)
            apart.replace(self.file.with_suffix(".npz"))
            apart.write_text(text + "\n")
            apart.replace(self.file)


def peak(device):
    """GiB of a GPU's memory that tensors have taken at most since this was last asked."""
    if not device.startswith("cuda"):
        return None
    gib = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    torch.cuda.reset_peak_memory_stats()
    return gib


def influence(args, results, name, network, X, y, X_test):
    """p-values by influence functions with the curvature of that name, a part of the test images at a time."""
    left = results.todo(name)
    if not len(left):
        return
    peak(args.device)
    start = time.perf_counter()
    clf = FullConformalClassifier(
        network, method="influence", curvature=name, prefit=True, l2=WEIGHT_DECAY,
        damping=args.damping if name in ("kfac", "ekfac") else None,
        device=args.device, memory_budget=args.memory, verbose=1,
    ).fit(X.cpu().numpy(), y.cpu().numpy())  # fmt: skip
    fit = time.perf_counter() - start
    results.note(name, fit_seconds=round(fit, 3), fit_peak_gib=peak(args.device))
    print(
        f"{name}: fitted in {fit:.1f} s, at most {results.rows[name]['fit_peak_gib']} GiB\n{clf.diagnose()}", flush=True
    )
    before = results.rows[name].get("parts", [])
    for at in np.split(left, range(args.part, len(left), args.part)):
        start = time.perf_counter()
        results.p[name][at] = clf.predict_p(X_test[at].cpu().numpy())
        part = {"test_points": len(at), "seconds": round(time.perf_counter() - start, 3), "peak_gib": peak(args.device)}
        before = [*before, part]
        print(f"{name}: {part}", flush=True)
        results.note(name, predict_p_seconds=round(sum(each["seconds"] for each in before), 3), parts=before)


def arguments(argv):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder with CIFAR-10")
    parser.add_argument("--out", help="file for the results, JSON; the p-values go beside it as .npz")
    parser.add_argument("--networks", help="folder that keeps the trained networks")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["split", "last_layer", "ekfac"],
        help="split, folds5 (or another number), or curvatures",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--n-train", type=int, default=None, help="training images; all by default")
    parser.add_argument("--n-test", type=int, default=None, help="test images; all by default")
    # Half-solved gradients of the training images are made anew for every part.
    parser.add_argument("--part", type=int, default=2500, help="test images that are taken together")
    parser.add_argument("--memory", type=float, default=40.0, help="GiB for the curvature and its blocks")
    # With hundreds of parameters a point and the weight decay alone, leverages reach 49 and the sets hold all labels.
    parser.add_argument("--damping", type=float, default=1.0, help="of kfac and ekfac, in mean form")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    """Train the networks and compare the prediction sets."""
    args = arguments(argv)
    raw, labels, raw_test, y_test = load(args.data)
    raw, labels = raw[: args.n_train], labels[: args.n_train]
    raw_test, y_test = raw_test[: args.n_test], y_test[: args.n_test]
    images = to_images(raw, args.device)
    mean, std = scale_of(images)
    X, X_test = ((part - mean) / std for part in (images, to_images(raw_test, args.device)))
    y = torch.as_tensor(labels, device=args.device).long()
    n, cut = len(y), len(y) * 4 // 5
    steps = max(1, args.epochs * n // args.batch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    results, networks = Results(args, y_test), {}
    for method in args.methods:
        name, index = ("split", order[:cut]) if method == "split" else ("full", order)
        if not len(results.todo(method)):
            continue
        if method.startswith("folds"):
            folds(args, results, method, raw, labels, raw_test, steps)
            continue
        if name not in networks:
            networks[name] = trained(args, name, X[index], y[index], steps)
        network, seconds = networks[name]
        accuracy = float((log_proba(network, X_test).argmax(1) == y_test).mean())
        size = sum(q.numel() for q in network.parameters())
        print(
            f"{method}: {len(index):,} images, {size:,} parameters, accuracy {accuracy:.4f}, trained in {seconds:.0f} s",
            flush=True,
        )
        results.note(method, training_seconds=round(seconds, 3), accuracy=accuracy)
        if method == "split":
            start = time.perf_counter()
            results.p[method][:] = split_p(network, X[order[cut:]], y[order[cut:]], X_test)
            results.note(method, predict_p_seconds=round(time.perf_counter() - start, 3))
        else:
            influence(args, results, method, network, X, y, X_test)
    return list(results.rows.values())


if __name__ == "__main__":
    main()
