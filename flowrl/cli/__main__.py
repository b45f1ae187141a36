"""`python -m flowrl.cli`."""

from flowrl.cli.usage import main

main()
