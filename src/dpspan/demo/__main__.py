"""`python -m dpspan.demo`."""

from dpspan.demo.command import main

if __name__ == "__main__":
    main()
