"""The imports of the package hold the layering table: data flow in one direction, siblings stay apart."""

import ast
import re
import sys
from pathlib import Path

import pytest

from benchmarks import house

SRC = Path(__file__).parents[1] / "src" / "fullconformal"

ARRAYS = ["pvalues", "sets", "intervals", "metrics", "conformity"]
CURVATURE_PARTS = [f"curvature.{name}" for name in ("base", "dense", "structured", "layers", "kronecker")]
METHOD_PARTS = [f"methods.{name}" for name in ("base", "outputs", "fitting", "parts", "regression")]
BELOW_METHODS = [
    *ARRAYS,
    *["runtime", "storage", "losses", "data", "problem", "linear", "curvature", "models", "influence", "last_layer"],
    *["diagnostics", "guarantees"],
]
ESTIMATORS = {
    f"estimators.{name}"
    for name in ("full", "full_regression", "split", "split_regression", "cross", "cross_regression")
}

# What each room, or a module of it that has a row of its own, may import from the package. A name stands for itself and its inside.
# Rows stand in the order of the flow: a room imports rooms above it only.
LAYERS = {
    "pvalues": [],
    "sets": [],
    "intervals": ["sets"],
    "metrics": ["sets", "metrics"],
    "runtime": ["runtime", "pvalues"],
    "storage": ["storage", "runtime"],
    "conformity": ["storage"],
    "guarantees": ["storage"],
    "losses": ["losses", "storage"],
    "data": [],
    "problem": ["problem", "losses", "runtime", "storage"],
    "linear": ["linear", "problem", "losses", "runtime", "pvalues", "storage"],
    # A matrix knows what matrices share, and no other matrix; `select` alone knows them all.
    "curvature": [*CURVATURE_PARTS, "problem", "losses", "runtime", "linear.products", "storage"],
    "curvature.select": ["curvature", "problem", "losses", "runtime"],
    "models": ["models", "losses", "runtime", "storage"],
    "influence": ["influence", "curvature", "problem", "losses", "runtime", "pvalues", "storage"],
    "last_layer": [
        *["last_layer", "curvature.base", "curvature.dense", "models", "losses", "runtime", "storage", "pvalues"],
    ],
    "diagnostics": ["problem", "losses", "curvature.base", "influence.prepared"],
    # A method knows what methods share, and no other method; `select` alone knows them all.
    "methods": [*BELOW_METHODS, *METHOD_PARTS],
    "methods.base": BELOW_METHODS,
    "methods.outputs": [*BELOW_METHODS, "methods.base"],
    "methods.fitting": [*BELOW_METHODS, "methods.base", "methods.outputs"],
    "methods.regression": [*BELOW_METHODS, "methods.base"],
    "methods.parts": [*BELOW_METHODS, "methods.base", "methods.outputs", "methods.fitting"],
    # The whole GGN of a streamed last layer is influence on its features.
    "methods.last_layer": [*BELOW_METHODS, *METHOD_PARTS, "methods.influence"],
    # The curvature of a network is chosen as for labels.
    "methods.influence_regression": [*BELOW_METHODS, *METHOD_PARTS, "methods.influence"],
    # Folds and out-of-bag scores are trained as for labels.
    "methods.unseen": [*BELOW_METHODS, *METHOD_PARTS, "methods.folds", "methods.oob"],
    "methods.refit_regression": [*BELOW_METHODS, *METHOD_PARTS, "methods.refit"],
    "methods.select": [*BELOW_METHODS, "methods"],
    # What was loaded behind transformers is fitted again: `select` says whether the method goes with its model.
    "methods.transformed": [*BELOW_METHODS, "methods"],
    "report": ["metrics", "sets", "pvalues", "runtime", "report"],
    "estimators": [*BELOW_METHODS, "methods", "report", "estimators"],
    "comparison": [*BELOW_METHODS, "methods", "report", "estimators"],
}
FREE = ["", "cli", "__main__"]  # the package's own __init__ and the command line may import everything
# Modules that no sibling imports: what they share is a module of its own.
APART = ESTIMATORS


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
        room = name.split(".")[0]
        if room in FREE:
            continue
        if room not in LAYERS:
            found.append(f"{name} has no row in the table")
            continue
        gathers = name == room  # a folder's __init__ gathers its members
        allowed = [*LAYERS.get(name, LAYERS[room]), *([room] if gathers else [])]
        for target in imported(name, source, sources):
            if target.split(".")[0] != "fullconformal":
                continue
            target = target.removeprefix("fullconformal").removeprefix(".")
            sibling = target in APART and target.split(".")[0] == room and not gathers
            if sibling or not inside(target, allowed):
                found.append(f"{name} imports {target or 'the package itself'}")
    return list(dict.fromkeys(found))


def foreign(name, source, known):
    """Top-level packages that a module imports, the standard library and this package left out."""
    tops = {target.split(".")[0] for target in imported(name, source, known)}
    return tops - sys.stdlib_module_names - {"fullconformal"}


def test_the_package_holds_the_table():
    assert violations(modules(SRC)) == []


def test_the_table_has_every_room_and_no_other():
    rooms = {name.split(".")[0] for name in modules(SRC)} - set(FREE)
    assert rooms == {name.split(".")[0] for name in LAYERS}


def test_the_table_flows_in_one_direction():
    rooms = list(dict.fromkeys(name.split(".")[0] for name in LAYERS))
    for name, allowed in LAYERS.items():
        above = rooms[: rooms.index(name.split(".")[0]) + 1]
        assert {target.split(".")[0] for target in allowed} <= set(above), name


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
    "losses": "",
    "problem": "from fullconformal.losses import Loss",
    "linear": "",
    "linear.products": "",
    "curvature": "from .hessian import Hessian\nfrom fullconformal.curvature import base",
    "curvature.base": "from ..problem import Problem",
    "curvature.hessian": "from .base import Factor\nfrom ..linear.products import gram",
    "curvature.ggn": "from fullconformal.curvature.base import Factor",
    "influence": "",
    "influence.direct": "from fullconformal import pvalues\nfrom ..curvature.base import Factor",
    "models": "",
    "models.mlp": "from . import fitting",
    "models.fitting": "import torch",
    "methods": "from .select import choose",
    "methods.base": "from ..storage import save",
    "methods.exact": "from .base import Method\nfrom fullconformal.methods.fitting import fit",
    "methods.fitting": "from .base import Config",
    "methods.select": "from . import base, exact",
    "storage": "",
    "estimators": "from .full import Full",
    "estimators.base": "",
    "estimators.full": "from . import base\nfrom ..curvature import Hessian\nimport fullconformal.diagnostics",
    "estimators.split": "from .base import Base",
    "diagnostics": "from .problem import Problem",
    "comparison": "from .estimators.full import Full",
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
        ("problem", "def f():\n    from .linear import g", "linear"),
        ("problem", "if TYPE_CHECKING:\n    from .influence import Score", "influence"),
        ("models.mlp", "from ..problem import Problem", "problem"),
        ("curvature.ggn", "from .hessian import Hessian", "curvature.hessian"),
        ("curvature.ggn", "from . import hessian", "curvature.hessian"),
        ("curvature.ggn", "from fullconformal.curvature import Hessian", "curvature"),
        ("curvature.base", "from ..influence.direct import direct", "influence.direct"),
        ("curvature", "from ..linear import fit", "linear"),
        ("influence.direct", "import fullconformal.methods.exact as h", "methods.exact"),
        ("methods.base", "from .fitting import fit", "methods.fitting"),
        ("methods.fitting", "from .exact import Exact", "methods.exact"),
        ("methods.exact", "from .select import choose", "methods.select"),
        ("methods.exact", "from fullconformal.methods import Exact", "methods"),
        ("methods.select", "from ..estimators.base import Base", "estimators.base"),
        ("diagnostics", "from .estimators.full import Full", "estimators.full"),
        ("estimators.split", "from .full import Full", "estimators.full"),
        ("estimators.base", "def f():\n    from . import split", "estimators.split"),
        ("estimators.full", "from ..comparison import compare", "comparison"),
        ("estimators.full", "from ..cli import main", "cli"),
        ("comparison", "from .cli import main", "cli"),
    ],
)
def test_the_checker_fails_on_a_violation(name, source, target):
    assert violations({**KNOWN, name: source}) == [f"{name} imports {target}"]


def test_the_checker_fails_on_a_module_without_a_row():
    assert violations({**KNOWN, "misc": ""}) == ["misc has no row in the table"]


def test_the_checker_sees_torch():
    assert foreign("sets", "import os\ndef f():\n    from torch.nn import Module", KNOWN) == {"torch"}


# The size of the house ---------------------------------------------------------------------------------------------------


NUMBERS = house.numbers(SRC)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_house_keeps_its_bars(number):
    found, bar = NUMBERS[number]
    assert found <= bar, f"{number.strip()}: {found}, at most {bar}; python benchmarks/house.py names them"


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "fullconformal"
    sources = {
        "__init__.py": '"""The public names."""\nfrom fullconformal.estimators.full import Full\n',
        "sets.py": '"""Sets."""\n\n# A reason.\nEPS = float("inf")\nFORMAT_VERSION = 2\nFEW, MANY = 2**3, 1e6\nNAMES = ("a",)\n',
        "losses/softmax.py": "from torch import softmax\n",
        "estimators/base.py": "class Base:\n    _kept = 1\n\n    def _fit(self):\n        self._own = _help()\n",
        "estimators/full.py": "from .base import Base\n\n\nclass Full(Base):\n    def fit(self, other):\n"
        '        """Fit,\n        at length."""\n        import fullconformal.estimators.late\n'
        "        return self._kept + other._own\n",
        "estimators/late.py": "RATES = {'cpu': 1.0, 'cuda': -2}\nTEXT = '''a\nb'''\n",
        "cli/fit.py": "from fullconformal.sets import _mask\n\n\ndef run(clf, X):\n    # softmax is but a word here\n"
        '    """cross_entropy"""\n    return clf._kept, clf._foreign, X.softmax(1), _mask\n',
    }
    for name, source in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_code_lines_are_without_docstrings_comments_and_blanks(package):
    counted = {path.name: house.code_lines(path) for path in house.files(package)}
    assert counted == {
        "__init__.py": 1, "sets.py": 4, "softmax.py": 1, "base.py": 4, "full.py": 5, "late.py": 3, "fit.py": 3,
    }  # fmt: skip
    assert house.modules(package) == 6 and house.all_code_lines(package) == 21
    assert house.longest_module(package) == (5, "estimators.full")


def test_private_names_count_across_rooms_only(package):
    assert house.crossings(package) == ["cli/fit.py:1 _mask", "cli/fit.py:7 _kept"]
    assert house.crossings(package, modules=True) == [*house.crossings(package), "estimators/full.py:9 _own"]


def test_constants_are_numbers_in_capitals(package):
    assert house.constants(package) == ["estimators/late.py:1 RATES", "sets.py:6 FEW", "sets.py:6 MANY"]


def test_chains_count_imports_inside_functions_if_asked(package):
    assert house.longest_chain(package, in_functions=False) == ["estimators.full", "estimators.base"]
    (package / "estimators" / "late.py").write_text("from . import base")
    house.tree.cache_clear()
    assert house.longest_chain(package) == ["estimators.full", "estimators.late", "estimators.base"]


def test_losses_are_named_in_code(package):
    assert house.naming_a_loss(package) == ["cli/fit.py"]


def test_modules_named_in_contributing_exist():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)[a-z_]+)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (SRC / f"{name}.py").exists()] == []
