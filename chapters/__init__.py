"""The course: chapters as NN_name.py and NN_name.ipynb; figures*.py and show.py hold what they draw and print with."""
