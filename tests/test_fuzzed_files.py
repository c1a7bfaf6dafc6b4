"""Files of changed values, by the thousand, in processes of their own: an audit hook watches, and cannot be taken off again."""

import os
import subprocess
import sys
from pathlib import Path

import forged

import fullconformal


def test_thousands_of_files_of_changed_values_do_nothing_but_fail():
    """Two seeds side by side; `python tests/forged.py 200000` tries more."""
    paths = [str(Path(fullconformal.__file__).parents[1]), str(Path(forged.__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, forged.__file__, "10000", seed],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for seed in ("0", "1")
    ]
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0, said[-5000:]
        assert "10,000 files" in said
