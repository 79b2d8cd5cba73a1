"""`python -m dpspan.app.demo`."""

from dpspan.app.demo.command import main

if __name__ == "__main__":
    main()
