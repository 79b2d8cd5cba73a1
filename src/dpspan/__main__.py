"""`python -m dpspan`."""

from dpspan.cli import main

main()
