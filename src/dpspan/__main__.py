"""`python -m dpspan`."""

from dpspan.app.cli import main

main()
