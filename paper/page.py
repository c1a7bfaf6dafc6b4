"""The page: tables, figures and claims from the lines of a run, by `python -m paper.page FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from paper import figures
from paper.claims import claims
from paper.records import read_lines, write_atomically
from paper.tables import LABELS, WITH_P, Line, comparison, latest, seconds

DATA = ("ACSIncome", "MNIST", "CIFAR-10", "digits")


def build(folder: Path) -> Path:
    """Write the page of a folder of results."""
    lines = latest(read_lines(folder / "results.jsonl"))
    if not lines:
        raise SystemExit(f"{folder / 'results.jsonl'} holds no results; run python -m paper.run --out {folder} first.")
    drawn = folder / "figures"
    drawn.mkdir(exist_ok=True)
    tables = [table for table in (
        *(comparison(lines, data, "size_auc", "Efficiency AUC, ε in [0, 0.2]", LABELS) for data in DATA),
        *(comparison(lines, data, "error@0.2", "ε less the error rate at ε = 0.2", LABELS, lambda error: 0.2 - error) for data in DATA),
        *(comparison(lines, data, "fuzziness", "Fuzziness", WITH_P) for data in DATA),
    ) if table is not None]  # fmt: skip
    pictures = {
        "Synthetic data": figures.synthetic(lines, drawn),
        "Set sizes": figures.sizes(lines, drawn),
        "Examples": figures.examples(folder, drawn),
    }
    said = claims(lines)
    findings = "".join(f"## {claim.text}\n\n" + "".join(f"- {one}\n" for one in claim.found) + "\n" for claim in said)
    write_atomically(folder / "findings.md", f"# What held, and what did not\n\n{findings}".encode())
    template = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template("page.html")
    text = template.render(
        tables=tables, time=seconds(lines), pictures=pictures, claims=said, runs=runs(lines),
        failed=[line for line in lines if "failed" in line], count=len(lines),
    )  # fmt: skip
    path = folder / "index.html"
    write_atomically(path, text.encode())
    return path


def runs(lines: list[Line]) -> list[str]:
    """Hardware and versions, each combination once."""
    found = set()
    for line in lines:
        if "versions" in line:
            versions = ", ".join(f"{name} {value}" for name, value in line["versions"].items())
            hardware = line["hardware"]
            found.add(
                f"{hardware['device']}; {hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads; {versions}"
            )
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
