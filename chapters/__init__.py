"""The course: NN_name.py and NN_name.ipynb; support/ has the code that several chapters import, support/chNN/ one's."""
