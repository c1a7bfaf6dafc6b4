"""Benchmarks, the paper and the examples use what is public; the stages that benchmarks time are marked for torch's profiler."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

from fullconformal import FullConformalClassifier
from fullconformal.models import mlp

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("benchmarks", "paper", "examples") for path in (ROOT / folder).glob("*.py"))
PUBLIC = {
    "fullconformal",
    *(f"fullconformal.{name}" for name in ("curvature", "data", "losses", "metrics", "models", "pvalues", "sets")),
    *(f"fullconformal.report.{name}" for name in ("comparison", "page", "plots")),
}
MORE = {"fullconformal.problem": {"Problem"}}


def reaching(source):
    """Imports from inside the package, and private attributes of anything but self, cls and torch, as "line: what"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "fullconformal"]
            yield from (f"{node.lineno}: {name}" for name in modules if name not in PUBLIC)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fullconformal":
            for alias in node.names:
                if not is_public(node.module, alias.name):
                    yield f"{node.lineno}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            yield from [f"{node.lineno}: {node.attr}"] if owner(node) not in ("self", "cls", "torch", "nn") else []


def owner(node):
    """The variable that a chain of attributes starts from."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def is_public(module, name):
    if f"{module}.{name}" in PUBLIC:
        return True
    if module not in PUBLIC:
        return name in MORE.get(module, ())
    found = importlib.import_module(module)
    return name in getattr(found, "__all__", vars(found)) and not name.startswith("_")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_use_what_is_public(path):
    assert list(reaching(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from fullconformal import FullConformalClassifier, metrics, load\nimport fullconformal", []),
        ("from fullconformal.models import train\nfrom fullconformal.problem import Problem\nself._own", []),
        ("from fullconformal.models import requirements", ["1: fullconformal.models.requirements"]),
        ("from fullconformal.problem import flat", ["1: fullconformal.problem.flat"]),
        ("\nimport fullconformal.influence.tiles", ["2: fullconformal.influence.tiles"]),
        ("from fullconformal.sets import _mask", ["1: fullconformal.sets._mask"]),
        ("clf._fitted.__dict__", ["1: _fitted"]),
    ],
)
def test_the_checker_sees_what_is_not(source, found):
    assert list(reaching(source)) == found


def test_stages_are_marked_for_the_profiler():
    X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).numpy()
    clf = FullConformalClassifier(mlp(3, (2,), 2), method="influence", curvature="ggn", l2=1.0, max_epochs=1)
    with torch.profiler.profile() as profiler:
        clf.fit(X, X[:, 0] > 0).predict_p(X[:5])
    stages = {event.key for event in profiler.key_averages() if event.key.startswith("fullconformal.")}
    assert stages == {f"fullconformal.{name}" for name in ("curvature", "factor", "self-influences", "counts")}
