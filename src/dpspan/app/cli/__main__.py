"""`python -m dpspan.app.cli`."""

from dpspan.app.cli import main

main()
