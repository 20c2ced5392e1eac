"""python -m prefixroute = the command."""

from prefixroute.cli import main

main()
