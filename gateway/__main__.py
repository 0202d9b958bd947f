"""``python -m gateway``: the same as the ``gateway`` command."""

from gateway.cli import main

main()
