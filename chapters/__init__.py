"""The course: NN_name.py and NN_name.ipynb; support/ has the code that chapters import."""
