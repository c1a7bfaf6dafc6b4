"""`python -m fullconformal` is the command."""

from fullconformal.cli import main

main()
