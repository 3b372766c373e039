"""``python -m kvtide``: the ``kvtide`` command, where it is not on the path."""

from kvtide.cli import main

main()
