"""What every room leans on: checks, errors, files, randomness, a model left as found."""
