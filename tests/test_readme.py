"""The code of the README runs and does what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block, capsys):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["p"].shape in ((200, 2), (200,))
    # Coverage of 200 points, 0.95 or 0.9 asked for; the band of a binomial at 99.9 %.
    assert 0.82 < float(capsys.readouterr().out.split()[0]) <= 1


def test_there_is_code_to_run():
    assert len(BLOCKS) == 2
