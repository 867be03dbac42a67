"""`python -m kvsketch`, for where the command is not on the path."""

from kvsketch.cli import main

main()
