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
    assert names["p"].shape == (200, 2)
    assert 0.85 < float(capsys.readouterr().out.split()[0]) <= 1  # coverage, 0.95 asked for, 200 points


def test_there_is_code_to_run():
    assert len(BLOCKS) == 1
