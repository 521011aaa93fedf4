"""Exercises with graders: write the function of an eNN_*.py, then run `make exercises`."""
