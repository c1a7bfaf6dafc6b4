"""Run experiments: `python -m paper.run [NAMES] --out FOLDER`. What is finished is kept; a run that was killed goes on.

python -m paper.run --small --out build/paper-small        every experiment on reduced sizes
python -m paper.run mnist --data FOLDER --out paper/results --device cuda
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullconformal import data, metrics
from fullconformal.sets import members
from paper import synthetic
from paper.config import CONFIGS, Config, Real, Synthetic, key, load
from paper.inputs import load_data, make_inputs
from paper.methods import METHODS, Setting, n_symmetric
from paper.records import Records, environment, save_arrays
from paper.training import train_setting

EPSILONS = np.arange(101) / 100
ERRORS_AT = (0.01, 0.05, 0.1, 0.2)
FIRST = 100  # the paper's test points
Tell = Callable[[str], None]


def measured(epsilon: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Every metric of the largest ε's (m, C) at which labels are in the sets, each with its standard error."""
    out: dict[str, Any] = {
        "m": len(y),
        "size_auc": list(metrics.size_auc(epsilon)),
        "fuzziness": list(metrics.fuzziness(epsilon)),
    }
    for level in ERRORS_AT:
        sets = members(epsilon, level)
        out[f"error@{level}"] = list(metrics.error_rate(sets, y))
        out[f"size@{level}"] = list(metrics.mean_size(sets))
        out[f"empty@{level}"] = list(metrics.empty_rate(sets))
    return out


def curves(epsilon: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Mean size and error at ε = 0, 0.01, …, 1."""
    own = epsilon[np.arange(len(y)), y]
    return {
        "size": [round(float(members(epsilon, level).sum(1).mean()), 5) for level in EPSILONS],
        "error": [round(float(1 - members(own, level).mean()), 5) for level in EPSILONS],
    }


@dataclass(frozen=True)
class Machine:
    """Where and how a run works: device, GiB it may take, folder of the data, whom to tell, and which models and methods only."""

    device: str = "cpu"
    memory: float = 4.0
    folder: str | None = None
    tell: Tell = print
    models: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def progress(self, label: str, every: float = 10.0) -> Callable[[int, int], None]:
        """A callback that tells how far a training is, every so many seconds."""
        last = time.perf_counter()

        def at(done: int, total: int) -> None:
            nonlocal last
            if time.perf_counter() - last > every:
                last = time.perf_counter()
                self.tell(f"{label}: epoch {done} of at most {total}")

        return at


def run_real(config: Real, records: Records, machine: Machine) -> None:
    """All models, seeds and methods of one data set."""
    found = load_data(config, machine.folder)
    tell, device = machine.tell, machine.device
    tell(str(found))
    methods = [method for method in config.methods if method in (machine.methods or config.methods)]
    for model in config.models:
        here = [method for method in methods if method != "symmetric" or n_symmetric(config, model)]
        wanted = [(seed, method) for seed in config.seeds for method in here]
        left = [one for one in wanted if line_key(config, model, *one) not in records.done]
        if not left or (machine.models and model not in machine.models):
            continue
        label = f"{config.name} {model}"
        inputs = make_inputs(config, found, model, records, device, machine.progress(f"{label}, autoencoder"))
        start = time.perf_counter()
        needed = {method for _, method in left}
        networks = train_setting(config, model, inputs, records, device, needed, machine.progress(label))
        tell(
            f"{label}: {len(networks)} networks, {time.perf_counter() - start:.1f} s; {len(left)} of {len(wanted)} lines to do"
        )
        for seed in config.seeds:
            setting = Setting(config, model, inputs, networks, seed, device, machine.memory)
            for method in here:
                if (seed, method) in left:
                    run_method(setting, method, found, records, tell)
        del networks, inputs
    save_examples(config, found, records)


def line_key(config: Config, *parts: Any) -> str:
    """The name of a line; it changes with any setting but the list of methods, of which a line has one."""
    settings = (field.name for field in fields(config) if field.name != "methods")
    return "-".join([config.name, *map(str, parts), key(config, *settings)])


def run_method(setting: Setting, method: str, found: data.Dataset, records: Records, tell: Tell) -> None:
    """One line: a model, a seed and a method."""
    config, inputs = setting.config, setting.inputs
    name = line_key(config, setting.model, setting.seed, method)
    try:
        result = METHODS[method](setting)
    except Exception as error:  # one method that fails, of memory say, must not take a night's run with it
        records.add({"key": name, "experiment": config.name, "data": found.name, "model": setting.model, "method": method,
                     "seed": setting.seed, "failed": f"{type(error).__name__}: {error}"})  # fmt: skip
        tell(f"{name} FAILED: {type(error).__name__}: {error}")
        return
    epsilon, y = result.epsilon, inputs.y_test[: len(result.epsilon)]
    few = n_symmetric(config, setting.model) or FIRST  # the points that the exactly valid method is judged by
    line = {
        "key": name,
        "experiment": config.name, "data": found.name, "model": setting.model, "method": method, "seed": setting.seed,
        "n": len(inputs.y), "p": setting.p,
        "first": measured(epsilon[:FIRST], y[:FIRST]), "all": measured(epsilon, y),
        "same": measured(epsilon[:few], y[:few]), "curve": curves(epsilon, y),
        "accuracy": float((epsilon.argmax(1) == y).mean()),
        "seconds": {"train": result.train, "fit": result.fit, "predict": result.predict},
        "note": found.note, **result.more, **environment(setting.device),
    }  # fmt: skip
    records.add(line, epsilon=epsilon.astype(np.float32))
    told = line["all"]
    tell(
        f"{config.name} {setting.model} seed {setting.seed} {method}: size AUC {told['size_auc'][0]:.3f}, "
        f"error at 0.1 {told['error@0.1'][0]:.3f}, {result.fit:.1f} + {result.predict:.1f} s"
    )


def save_examples(config: Real, found: data.Dataset, records: Records) -> None:
    """Images shown, with their ε by every method, of the largest perceptron's first seed."""
    model = "MLP_C" if "MLP_C" in config.models else config.models[0]
    names = {line_key(config, model, config.seeds[0], method): method for method in config.methods}
    lines = {names[line["key"]]: line for line in records.lines if line["key"] in names and "all" in line}
    lines = {method: line for method, line in lines.items() if (records.folder / line["arrays"]).is_file()}
    if not (config.examples or config.example_labels) or "scp" not in lines:
        return
    loaded = {}
    for method, line in lines.items():
        if line["first"]["m"] == lines["scp"]["first"]["m"]:  # the exactly valid method may have fewer points
            with np.load(records.folder / line["arrays"]) as arrays:
                loaded[method] = arrays["epsilon"][:FIRST]
    own = loaded["scp"][np.arange(len(loaded["scp"])), found.y_test[: len(loaded["scp"])]]
    hardest = [
        int(places[own[places].argmin()])
        for label in config.example_labels
        if len(places := np.flatnonzero(found.y_test[: len(own)] == label))
    ]
    chosen = [at for at in (*config.examples, *hardest) if at < len(own)]
    if chosen:
        save_arrays(
            records.folder / f"examples-{config.name}.npz",
            {
                "position": np.array(chosen), "image": found.X_test[chosen], "label": found.y_test[chosen],
                "classes": np.array(found.classes), **{f"epsilon_{method}": value[chosen] for method, value in loaded.items()},
            },
        )  # fmt: skip


def run_synthetic(config: Synthetic, records: Records, tell: Tell) -> None:
    """All lines of one experiment on synthetic data; on the CPU, in float64."""
    if config.measure not in synthetic.MEASURES:
        raise ValueError(
            f"{config.name}: measure={config.measure!r} is unknown; allowed: {', '.join(synthetic.MEASURES)}."
        )
    for case in synthetic.cases(config):
        name = line_key(config, *case.values())
        if name in records.done:
            continue
        start = time.perf_counter()
        found = synthetic.MEASURES[config.measure](config, **case)
        seconds = time.perf_counter() - start
        records.add({"key": name, "experiment": config.name, "data": "synthetic", "measure": config.measure, **case,
                     "found": found, "total_seconds": seconds, **environment("cpu")})  # fmt: skip
        tell(f"{config.name} {case}: {seconds:.1f} s")


def run(config: Config, records: Records, machine: Machine) -> None:
    """One experiment."""
    if isinstance(config, Real):
        run_real(config, records, machine)
    else:
        run_synthetic(config, records, machine.tell)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    parser.add_argument(
        "names", nargs="*", help=f"experiments, or paths of configs; by default all: {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", help="folder of the data sets; by default that of FULLCONFORMAL_DATA")
    parser.add_argument("--small", action="store_true", help="reduced sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, help="GiB for curvature and blocks; by default 4, on CUDA 64")
    parser.add_argument("--models", nargs="+", default=[], help="only these of a data set's models")
    parser.add_argument("--methods", nargs="+", default=[], choices=list(METHODS), help="only these methods")
    args = parser.parse_args(argv)
    paths = [Path(name) if name.endswith(".toml") else CONFIGS / f"{name}.toml" for name in args.names or names]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent:
        parser.error(f"no config {absent[0]}; there are {', '.join(names)}")
    configs = [load(path, args.small) for path in paths]  # all are read before anything runs
    begin = time.perf_counter()

    def tell(text: str) -> None:
        print(f"[{time.perf_counter() - begin:7.1f} s] {text}", file=sys.stderr, flush=True)

    records = Records(args.out)
    memory = args.memory or (64.0 if args.device.startswith("cuda") else 4.0)
    machine = Machine(args.device, memory, args.data, tell, tuple(args.models), tuple(args.methods))
    for config in configs:
        run(config, records, machine)
    failed = [line["key"] for line in records.lines if "failed" in line]
    tell(f"{len(records.lines)} lines in {records.path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
