"""The code of the README runs and does what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
# Each block of code, and what is shown to be printed by it.
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize(("block", "shown"), BLOCKS)
def test_code_blocks_run_and_print_what_is_shown(block, shown, capsys):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["p"].shape in ((200, 2), (200,))
    printed, known = (re.findall(r"[\d.]+", text) for text in (capsys.readouterr().out, shown))
    # One object of two hundred more or less, on another machine.
    assert [float(number) for number in printed] == pytest.approx([float(number) for number in known], rel=0.01)
    # Coverage of 200 points, 0.95 or 0.9 asked for; the band of a binomial at 99.9 %.
    assert 0.82 < float(printed[0]) <= 1


def test_there_is_code_to_run():
    assert len(BLOCKS) == 2 == README.count("```python")
