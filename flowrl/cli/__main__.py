"""`python -m flowrl.cli`."""

from flowrl.cli.app import main

main()
