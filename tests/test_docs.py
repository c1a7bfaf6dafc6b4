"""Every page of the documentation does what it says: its Python runs, its commands run, and both print what is shown beneath them.

Blocks run in the order in which a reader meets them, in one folder a page.
"""

import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path

import matplotlib
import pytest
from click.testing import CliRunner

import fullconformal
from fullconformal import data, metrics, models
from fullconformal.cli import main
from fullconformal.curvature import CURVATURES

ROOT = Path(__file__).parents[1]
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.rst") if not {"_build", "gallery", "generated"} & set(p.parts))
PEOPLE = ROOT / "tests" / "data" / "people.csv"
NUMBER = r"\d+(?:,\d{3}\b)*(?:\.\d+)?"
NEARLY = 0.05  # one object of a hundred more or less, on another machine


def blocks(text):
    """Kind and body of the `.. code-block::` directives."""
    found = re.finditer(r"^( *)\.\. code-block:: (\w+)\n((?:\1 +:.*\n)*)\n((?:\1 {3,}.*\n|\s*\n)+)", text + "\n", re.M)
    return [(match[2], textwrap.dedent(match[4])) for match in found]


def commands(block):
    """Each command of a console block, and the lines it is shown to print."""
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [(part.splitlines()[0], part.splitlines()[1:]) for part in parts]


def plain(line):
    """A line without what differs between machines: times, the width of tables."""
    line = re.sub(rf"{NUMBER} m?s\b", "TIME", re.sub("─+", "─", line))
    return " ".join(line.split())


def alike(shown, line):
    """Whether a line is the one shown: numbers nearly, … for anything."""
    shown, line = plain(shown), plain(line)
    shape = re.escape(re.sub(NUMBER, "0", shown)).replace("…", ".*")
    if not re.fullmatch(shape, re.sub(NUMBER, "0", line)):
        return False
    if "…" in shown:
        return True
    a, b = ([float(number.replace(",", "")) for number in re.findall(NUMBER, text)] for text in (shown, line))
    return all(abs(x - y) <= NEARLY * max(1, x) for x, y in zip(a, b, strict=True))


def missing(shown, output):
    """The first shown line that was not printed, or the first printed one that is not shown; … on its own is any lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    anything = not any(map(str.strip, shown))
    for line in filter(str.strip, shown):
        if line.strip() == "…":
            anything = True
            continue
        while anything and lines and not alike(line, lines[0]):
            lines.pop(0)
        if not lines or not alike(line, lines.pop(0)):
            return line
        anything = False
    return lines[0] if lines and not anything else None


def run(command):
    """What a command of ours prints; of others only `head` is known."""
    words = shlex.split(command, comments=True)
    if words[0] == "head":
        return "\n".join(Path(words[-1]).read_text(encoding="utf-8").splitlines()[: int(words[2])])
    if words[0] != "fullconformal":
        return None
    result = CliRunner().invoke(main, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, f"{command}: {result.output}"
    # A busy machine is told how long it will take.
    return re.sub(r"^[a-z-]+: about [\d.,]+ \w+\n", "", result.output, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_page_runs(page, tmp_path, monkeypatch):
    for peer in re.findall(r"^ +from (mapie|crepes)", page.read_text(encoding="utf-8"), re.M):
        pytest.importorskip(peer)
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    people = PEOPLE.read_text(encoding="utf-8").splitlines(keepends=True)  # the table of pages that make none
    Path("people.csv").write_text("".join(people[:301]), encoding="utf-8")
    Path("new.csv").write_text("".join([people[0], *people[301:]]), encoding="utf-8")
    names, printed = {"__name__": "page"}, None
    for number, (kind, block) in enumerate(blocks(page.read_text(encoding="utf-8"))):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, f"{page.name}, block {number}", "exec"), names)
            printed = out.getvalue()
        elif kind == "text":
            assert printed is not None, f"{block}: a block of text shows what the block of Python before it prints"
            assert missing(block.splitlines(), printed) is None, printed
        elif kind == "console":
            for command, shown in commands(block):
                output = run(command)
                assert output is None or missing(shown, output) is None, f"{command}\n{output}"


def test_every_block_is_checked():
    kinds = {kind for page in PAGES for kind, _ in blocks(page.read_text(encoding="utf-8"))}
    assert kinds == {"python", "console", "text"}


@pytest.mark.parametrize("module", [fullconformal, data, metrics, models], ids=lambda module: module.__name__)
def test_the_reference_lists_every_public_name(module):
    listed = set((ROOT / "docs" / "api.rst").read_text(encoding="utf-8").split())
    assert set(module.__all__) <= listed


def test_the_reference_and_the_guide_list_every_curvature():
    listed = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8").split()
    guide = (ROOT / "docs" / "howto" / "large.rst").read_text(encoding="utf-8")
    for name, curvature in CURVATURES.items():
        assert curvature.__name__ in listed and f'``"{name}"``' in guide, name


def test_formulas_keep_to_what_is_read_right():
    r"""docutils takes \tfrac12 x for 12/x, and sets the index of \hat g_y below the letter."""
    for page in PAGES:
        assert not re.search(r"\\t?frac(?!\{)|\\(?:hat|bar) ?\w_", page.read_text(encoding="utf-8")), page


def test_blocks_and_commands_are_found():
    text = "Text\n\n.. code-block:: python\n\n   a = 1\n\n   b = a\n\nMore\n\n.. code-block:: console\n\n   $ ls\n   a\n   $ cd\n"
    assert [(kind, body.strip()) for kind, body in blocks(text)] == [
        ("python", "a = 1\n\nb = a"),
        ("console", "$ ls\na\n$ cd"),
    ]
    assert commands("$ ls\na\n$ cd\n") == [("ls", ["a"]), ("cd", [])]


def test_what_is_shown_is_compared():
    output = "fitted in 0.1 s\n\n  a   0.94 ± 0.01\n──────\n/tmp/x/report.html\n"
    assert missing(["fitted in 7 ms", "a 0.95 ± 0.01", "───", "…/report.html"], output) is None
    assert missing(["…", "/tmp/…"], output) is None
    assert missing([], output) is None
    assert missing(["fitted in 0.1 s"], output) == "  a   0.94 ± 0.01"
    assert missing(["fitted in 0.1 s", "b 0.94 ± 0.01", "…"], output) == "b 0.94 ± 0.01"
    assert missing(["fitted in 0.1 s", "a 0.84 ± 0.01", "…"], output) == "a 0.84 ± 0.01"
    assert missing(["…", "never"], output) == "never"
