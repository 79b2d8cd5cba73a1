"""`python -m dpspan.cli`."""

from dpspan.cli import main

main()
