"""``python -m kvtide`` runs the ``kvtide`` command if it is not on the path."""

from kvtide.cli import main

main()
