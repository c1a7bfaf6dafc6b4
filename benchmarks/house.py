"""How large and how tidy the package is, each number beside its bar.

    python benchmarks/house.py            src/fullconformal
    python benchmarks/house.py PATH       another version, for a column of before

Sources are read, never imported: any version can be measured, with the standard library and rich.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

SRC = Path(__file__).parents[1] / "src" / "fullconformal"
LOSS_WORDS = frozenset({"softmax", "log_softmax", "cross_entropy", "logsumexp"})
# Bayes' rule normalises class densities by a logsumexp: a model's own probabilities, no loss.
NO_LOSS = frozenset({"models/distances.py"})


def files(root: Path) -> list[Path]:
    """All source files of a package."""
    return sorted(root.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path, root: Path) -> str:
    """The top-level folder or module that a file belongs to."""
    return path.relative_to(root).with_suffix("").parts[0]


def name_of(path: Path, root: Path) -> str:
    """Dotted name inside the package; a folder's `__init__` has the folder's name."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


# Size -------------------------------------------------------------------------------------------------------------------


def modules(root: Path) -> int:
    """Files that are no `__init__`."""
    return sum(path.name != "__init__.py" for path in files(root))


def code_lines(path: Path) -> int:
    """Lines that hold code: no docstrings, comments or blank lines."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def all_code_lines(root: Path) -> int:
    return sum(map(code_lines, files(root)))


def longest_module(root: Path) -> tuple[int, str]:
    """Code lines of the longest module, and its name."""
    return max((code_lines(path), name_of(path, root)) for path in files(root))


# Borders ----------------------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def defined(path: Path) -> Iterator[str]:
    """Names that a file defines anywhere: functions, classes, variables and attributes."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def crossings(root: Path, modules: bool = False) -> list[str]:
    """Private names of another room that a file imports or reaches for, as "file:line name"; of another module if `modules`.

    An attribute `x._name`, x neither self nor cls, counts where the package defines `_name` and the file's own room does not: private
    names of scikit-learn or torch do not count.
    """

    def home(path: Path) -> str:
        return name_of(path, root) if modules else room(path, root)

    names_of: dict[str, set[str]] = {}
    for path in files(root):
        names_of.setdefault(home(path), set()).update(filter(is_private, defined(path)))
    everywhere = set().union(*names_of.values())
    found = []
    for path in files(root):
        foreign = everywhere - names_of[home(path)]
        for node in ast.walk(tree(path)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (source := absolute(node, path, root)) is not None:
                source = source if modules else source.split(".")[0]
                names = [alias.name for alias in node.names if source != home(path) and is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and node.attr in foreign and not is_self(node.value):
                names = [node.attr]
            found += [f"{path.relative_to(root)}:{node.lineno} {name}" for name in names]
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def absolute(node: ast.ImportFrom, path: Path, root: Path) -> str | None:
    """The dotted name inside the package that a `from … import` reads from; None outside of the package."""
    if not node.level:
        module = node.module or ""
        inside = module == root.name or module.startswith(root.name + ".")
        return module.removeprefix(root.name).removeprefix(".") if inside else None
    folder = path.relative_to(root).parts[:-1]
    return ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


# Constants --------------------------------------------------------------------------------------------------------------


def constants(root: Path) -> list[str]:
    """Numeric tuning constants, as "file:line NAME": names in capitals at module level, bound to literal numbers.

    Numbers in tuples, lists, sets and dicts and arithmetic on literals count; each name once. What is computed by a call (the
    precision of a type) and names with VERSION in them (of formats) tune nothing and do not count.
    """
    found = []
    for path in files(root):
        for node in tree(path).body:
            names = [name for name in bound(node) if name.isupper() and "VERSION" not in name]
            found += [f"{path.relative_to(root)}:{node.lineno} {name}" for name in names]
    return found


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds to numbers."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        if node.value is not None and is_numeric(node.value):
            yield node.target.id
    elif isinstance(node, ast.Assign) and is_numeric(node.value):
        for target in node.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part.id for part in parts if isinstance(part, ast.Name))


def is_numeric(node: ast.expr) -> bool:
    """Whether an expression is made of literal numbers alone; a dict's keys may be anything."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return is_numeric(node.operand)
    if isinstance(node, ast.BinOp):
        return is_numeric(node.left) and is_numeric(node.right)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return bool(node.elts) and all(map(is_numeric, node.elts))
    if isinstance(node, ast.Dict):
        return bool(node.values) and all(map(is_numeric, node.values))
    return False


# Imports ----------------------------------------------------------------------------------------------------------------


def statements(node: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """All nodes below a node; without `in_functions`, those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if in_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from statements(child, in_functions)


def imports(path: Path, root: Path, known: Iterable[str], in_functions: bool = True) -> set[str]:
    """Those of the known modules of the package that a file imports."""
    known, out = set(known), set()
    for node in statements(tree(path), in_functions):
        if isinstance(node, ast.Import):
            names = [a.name.removeprefix(root.name + ".") for a in node.names if a.name.startswith(root.name + ".")]
        elif isinstance(node, ast.ImportFrom) and (base := absolute(node, path, root)) is not None:
            names = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names] + [base]
        else:
            continue
        out.update(name for name in names if name in known)
    return out


def longest_chain(root: Path, folder: str = "estimators", in_functions: bool = True) -> list[str]:
    """The longest path of imports among the modules of a folder, `__init__` left out: each imports the next."""
    inside = {name_of(path, root): path for path in files(root / folder) if path.name != "__init__.py"}
    graph = {name: imports(path, root, inside, in_functions) - {name} for name, path in inside.items()}

    def longest(name: str, seen: tuple[str, ...]) -> list[str]:
        further = [longest(other, (*seen, name)) for other in sorted(graph[name]) if other not in (*seen, name)]
        return [name, *max(further, key=len, default=[])]

    return max((longest(name, ()) for name in sorted(graph)), key=len, default=[])


# Losses -----------------------------------------------------------------------------------------------------------------


def naming_a_loss(root: Path) -> list[str]:
    """Files outside of losses/ whose code names one, comments and strings left out."""
    found = []
    for path in files(root):
        place = path.relative_to(root).as_posix()
        if room(path, root) != "losses" and place not in NO_LOSS and LOSS_WORDS & set(identifiers(path)):
            found.append(place)
    return found


def identifiers(path: Path) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return (token.string for token in tokens if token.type == tokenize.NAME)


def numbers(root: Path) -> dict[str, tuple[int, int]]:
    """Each number and its bar."""
    return {
        # 90 and 10,500 for classification by five methods; since then intervals, transformers in the bag, folds, forests,
        # hostile files; closed forms for LDA and naive Bayes, categories, intervals by folds and by refits, a fuller page;
        # what new users met: models around Pipelines, saved functions of the target, tables of other marks, codes and encodings;
        # a look at every part of a file that could be turned against its reader; bounds on leverages by energies; and pairs of
        # many classes that need no matrix each, with a default that nobody has to wait for; lassos of dependent columns, codes that are
        # copied as written, models told of whose sets would be useless, columns named that a Pipeline fails on; Hessians below those of
        # many candidates.
        "modules": (modules(root), 131),
        "code lines": (all_code_lines(root), 18_660),
        "longest module, code lines": (longest_module(root)[0], 250),
        "private names across a room's border": (len(crossings(root)), 0),
        "numeric tuning constants": (len(constants(root)), 64),
        "longest import chain in estimators/": (len(longest_chain(root, in_functions=False)), 4),
        "    with imports inside functions": (len(longest_chain(root)), 4),
        "files outside of losses/ that name a loss": (len(naming_a_loss(root)), 0),
    }


def main(root: Path) -> None:
    table = Table(box=None, padding=(0, 2))
    for head in ("", "found", "at most", ""):
        table.add_column(head, justify="right" if head else "left")
    for what, (found, bar) in numbers(root).items():
        table.add_row(what, f"{found:,}", f"{bar:,}", "[red]ABOVE[/]" if found > bar else "")
    console = Console(width=140)
    console.print(table, "")
    parts = {
        "Longest module": [longest_module(root)[1]],
        "Longest chain": longest_chain(root),
        "Private names across a room's border": crossings(root),
        "and across a module's": crossings(root, modules=True),
        "Constants": constants(root),
        "Naming a loss": naming_a_loss(root),
    }
    for title, items in parts.items():
        console.print(f"[bold]{title}[/] ({len(items)}): {', '.join(items) or 'none'}\n", highlight=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SRC)
