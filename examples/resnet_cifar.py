"""
Prediction sets of a ResNet-18 on CIFAR-10
==========================================

Eleven million parameters have no Hessian that could be written down. Two ways around: the curvature of the last layer alone, and EKFAC,
which takes the curvature of each layer to be a Kronecker product with corrected eigenvalues. Both are approximations, so both are put
beside split CP with a network that was trained for as many steps on four fifths of the data, on the whole test set.

    python examples/resnet_cifar.py --data FOLDER

FOLDER holds the six files of CIFAR-10's binary version (`fullconformal data cifar10 --folder FOLDER --download`), or parts
``train*.npz`` and ``test*.npz`` with arrays X (n, 3, 32, 32) of uint8 and y (n,). On one recent GPU it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
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


def standardise(X, like, device):
    """Images as float32 on a device, each channel by the mean and deviation of the training images."""
    mean, std = like.mean((0, 2, 3)) / 255, like.std((0, 2, 3)) / 255
    images = torch.as_tensor(X, device=device).float() / 255
    shape = (1, 3, 1, 1)
    return (images - torch.tensor(mean, device=device).float().view(shape)) / torch.tensor(
        std, device=device
    ).float().view(shape)


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
    """SGD with momentum, one cycle of the learning rate; the network is left in eval mode."""
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
    model.eval()
    # Scales and shifts of the normalisation (9,600 numbers) are taken as constants from here on.
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return model


@torch.no_grad()
def log_proba(model, X):
    """Log-probabilities (k, C) in float64."""
    return torch.cat([torch.log_softmax(model(part).double(), -1) for part in X.split(1000)]).cpu().numpy()


def split_p(model, X, y, X_test):
    """p-values (m, C) of split CP with the log loss, from calibration points the network has not seen."""
    scores = -log_proba(model, X)[np.arange(len(y)), y.cpu().numpy()]
    tau = -log_proba(model, X_test)
    greater, equal = (np.empty_like(tau) for _ in range(2))
    for at in range(0, len(tau), 1000):
        rows = slice(at, at + 1000)
        greater[rows], equal[rows] = count(scores[:, None, None], tau[rows])
    return p_values(greater, equal, len(scores))


def report(name, p, y, seconds):
    """Print coverage and sizes, and return them."""
    row = {"method": name, "seconds": round(seconds, 1), "size_auc": list(metrics.size_auc(p))}
    words = [f"{name:12}"]
    for epsilon in EPSILONS:
        sets = prediction_sets(p, 1 - epsilon)
        covered, size = metrics.coverage(sets, y), metrics.mean_size(sets)
        row[f"coverage at {epsilon}"], row[f"size at {epsilon}"] = list(covered), list(size)
        words.append(
            f"ε = {epsilon}: coverage {covered.value:.4f} ± {covered.se:.4f}, size {size.value:.3f} ± {size.se:.3f}"
        )
    print("; ".join(words) + f"; {seconds:.0f} s", flush=True)
    return row


def costs(clf, fit, predict):
    """Print what the p-values of one curvature took beside the training, and return it."""
    cost = {"fit_seconds": round(fit, 3), "predict_p_seconds": round(predict, 3)}
    words = [f"fit {fit:.1f} s, predict_p {predict:.1f} s"]
    formed = getattr(clf._engine, "formed", None)
    if formed is not None:
        cost["pairs_formed"] = formed
        words.append(f"{formed:.3%} of the pairs of a candidate and a training point were formed")
    if torch.cuda.is_available():
        cost["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        words.append(f"at most {cost['peak_gib']} GiB so far")
    print("  " + ", ".join(words), flush=True)
    return cost


def main(argv=None):
    """Train two networks and compare the prediction sets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", required=True, help="folder with CIFAR-10")
    parser.add_argument("--out", help="file for the results, JSON; the p-values go beside it as .npz")
    parser.add_argument("--curvatures", nargs="+", default=["last_layer", "ekfac"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--n-train", type=int, default=None, help="training images; all by default")
    parser.add_argument("--n-test", type=int, default=None, help="test images; all by default")
    parser.add_argument("--memory", type=float, default=40.0, help="GiB for the curvature and its blocks")
    # With hundreds of parameters a point and the weight decay alone, leverages reach 49 and the sets hold all labels.
    parser.add_argument("--damping", type=float, default=1.0, help="of kfac and ekfac, in mean form")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    raw, labels, raw_test, y_test = load(args.data)
    raw, labels, raw_test, y_test = (
        raw[: args.n_train],
        labels[: args.n_train],
        raw_test[: args.n_test],
        y_test[: args.n_test],
    )
    X, X_test = (standardise(part, raw, args.device) for part in (raw, raw_test))
    y = torch.as_tensor(labels, device=args.device).long()
    n, cut = len(y), len(y) * 4 // 5
    steps = max(1, args.epochs * n // args.batch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed)).to(args.device)

    networks, seconds = {}, {}
    for name, index in (("full", order), ("split", order[:cut])):
        torch.manual_seed(args.seed)
        start = time.perf_counter()
        model = resnet18(args.width).to(args.device)
        networks[name] = train(model, X[index], y[index], steps, min(args.batch, len(index)), args.seed, name)
        seconds[name] = time.perf_counter() - start
        accuracy = (log_proba(model, X_test).argmax(1) == y_test).mean()
        print(
            f"{name}: {len(index):,} images, {sum(q.numel() for q in model.parameters()):,} parameters, accuracy {accuracy:.4f}"
        )

    start = time.perf_counter()
    p = {"split CP": split_p(networks["split"], X[order[cut:]], y[order[cut:]], X_test)}
    rows = [report("split CP", p["split CP"], y_test, seconds["split"] + time.perf_counter() - start)]
    for curvature in args.curvatures:
        start = time.perf_counter()
        clf = FullConformalClassifier(
            networks["full"], method="influence", curvature=curvature, prefit=True, l2=WEIGHT_DECAY,
            damping=args.damping if curvature in ("kfac", "ekfac") else None,
            device=args.device, memory_budget=args.memory, verbose=1,
        ).fit(X.cpu().numpy(), labels)  # fmt: skip
        fitted = time.perf_counter()
        p[curvature] = clf.predict_p(X_test.cpu().numpy())
        done = time.perf_counter()
        rows.append(report(curvature, p[curvature], y_test, seconds["full"] + done - start))
        rows[-1] |= costs(clf, fitted - start, done - fitted)
        print(clf.diagnose())
    if args.out:
        device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        Path(args.out).write_text(
            json.dumps({"device": device, "arguments": vars(args), "rows": rows}, indent=1) + "\n"
        )
        np.savez_compressed(
            Path(args.out).with_suffix(".npz"), **{k: v.astype(np.float32) for k, v in p.items()}, y=y_test
        )
    return rows


if __name__ == "__main__":
    main()
