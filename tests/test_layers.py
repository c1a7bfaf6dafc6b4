"""The imports of the package hold the layering table: data flow in one direction, siblings stay apart."""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "fullconformal"

ARRAYS = ["pvalues", "sets", "metrics"]
BELOW_ESTIMATORS = [*ARRAYS, "models", "data", "problem", "convex", "curvature", "scores"]
SERVICES = ["report", "storage", "diagnostics"]

# What each module, or each module of a folder, may import from the package. A name stands for itself and its inside.
LAYERS = {
    **{name: [] for name in ARRAYS},
    "metrics": ["sets", "metrics"],
    "models": ["models"],
    "data": ["data"],
    "problem": ["problem"],
    "table": [],
    "convex": ["convex"],
    "curvature": [
        "problem",
        *(f"curvature.{name}" for name in ("base", "dense", "linear", "structured", "layers", "kronecker")),
    ],
    "scores": [
        *["problem", "convex", "curvature.base", "curvature.dense", "curvature.linear", "pvalues"],
        *["scores.base", "scores.training", "scores.checkpoint", "scores.kernels", "scores.tasks", "scores.halved"],
        *["scores.candidates", "scores.last_layer", "scores.windows"],
    ],
    "estimators": [*BELOW_ESTIMATORS, "storage", "diagnostics", "report", "estimators"],
    **{name: [*BELOW_ESTIMATORS, *SERVICES] for name in SERVICES},
    "comparison": [*BELOW_ESTIMATORS, *SERVICES, "estimators"],
}
FREE = ["", "cli", "__main__"]  # the package's own __init__ and the command line may import everything


def modules(root):
    """Source of each module by its name inside the package; a folder's __init__ has the folder's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imported(name, source, known):
    """Absolute dotted names that a module imports, functions and type-checking blocks included."""
    is_package = name == "" or any(other.startswith(name + ".") for other in known)
    package = ["fullconformal", *filter(None, name.split("."))]
    package = package if is_package else package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("fullconformal.") in known
                yield inner if is_module else base


def inside(target, names):
    return any(target == name or target.startswith(name + ".") for name in names)


def violations(sources):
    """One line for each import, of sources by module name, that the table does not allow."""
    found = []
    for name, source in sources.items():
        row = name.split(".")[0]
        if row in FREE:
            continue
        if row not in LAYERS:
            found.append(f"{name} has no row in the table")
            continue
        own = [row] if name == row else []  # a folder's __init__ gathers its members
        for target in imported(name, source, sources):
            if target.split(".")[0] != "fullconformal":
                continue
            target = target.removeprefix("fullconformal").removeprefix(".")
            if not inside(target, [*LAYERS[row], *own]):
                found.append(f"{name} imports {target or 'the package itself'}")
    return found


def foreign(name, source, known):
    """Top-level packages that a module imports, the standard library and this package left out."""
    tops = {target.split(".")[0] for target in imported(name, source, known)}
    return tops - sys.stdlib_module_names - {"fullconformal"}


def test_the_package_holds_the_table():
    sources = modules(SRC)
    assert {"pvalues", "sets", "metrics"} <= set(sources)
    assert violations(sources) == []


def test_arrays_know_numpy_and_scipy_only():
    sources = modules(SRC)
    for name in sources:
        if inside(name, ARRAYS):
            assert foreign(name, sources[name], sources) <= {"numpy", "scipy"}, name


def test_there_is_no_utils():
    assert [path for path in SRC.rglob("*.py") if path.stem in {"utils", "_utils"}] == []


# The checker itself, on a made-up package.
KNOWN = {
    "": "from fullconformal.estimators.full import Full",
    "pvalues": "import numpy as np",
    "sets": "",
    "problem": "",
    "convex": "",
    "curvature": "from .hessian import Hessian\nfrom fullconformal.curvature import base",
    "curvature.base": "from ..problem import Problem",
    "curvature.hessian": "from .base import Factor",
    "curvature.ggn": "from fullconformal.curvature.base import Factor",
    "scores": "",
    "scores.base": "",
    "scores.influence": "from fullconformal import pvalues, convex\nfrom ..curvature.base import Factor",
    "models": "",
    "models.mlp": "from . import fitting",
    "models.fitting": "import torch",
    "estimators": "",
    "estimators.base": "",
    "estimators.full": "from . import base\nfrom ..curvature import Hessian\nimport fullconformal.diagnostics",
    "diagnostics": "from .problem import Problem",
    "cli": "from fullconformal import Full",
}


def test_the_checker_passes_what_is_allowed():
    assert violations(KNOWN) == []


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("sets", "from fullconformal.pvalues import count", "pvalues"),
        ("sets", "from . import pvalues", "pvalues"),
        ("sets", "import fullconformal", "the package itself"),
        ("sets", "from fullconformal import Full", "the package itself"),
        ("problem", "def f():\n    from .convex import g", "convex"),
        ("problem", "if TYPE_CHECKING:\n    from .scores import Score", "scores"),
        ("models.mlp", "from ..problem import Problem", "problem"),
        ("curvature.ggn", "from .hessian import Hessian", "curvature.hessian"),
        ("curvature.ggn", "from . import hessian", "curvature.hessian"),
        ("curvature.ggn", "from fullconformal.curvature import Hessian", "curvature"),
        ("curvature.base", "from ..scores.base import Score", "scores.base"),
        ("curvature", "from ..convex import fit", "convex"),
        ("scores.influence", "import fullconformal.curvature.hessian as h", "curvature.hessian"),
        ("scores.influence", "from ..curvature import Hessian", "curvature"),
        ("diagnostics", "from .estimators.full import Full", "estimators.full"),
        ("estimators.full", "from ..cli import main", "cli"),
    ],
)
def test_the_checker_fails_on_a_violation(name, source, target):
    assert violations({**KNOWN, name: source}) == [f"{name} imports {target}"]


def test_the_checker_fails_on_a_module_without_a_row():
    assert violations({**KNOWN, "misc": ""}) == ["misc has no row in the table"]


def test_the_checker_sees_torch():
    assert foreign("sets", "import os\ndef f():\n    from torch.nn import Module", KNOWN) == {"torch"}
