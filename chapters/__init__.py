"""The course: NN_name.py and NN_name.ipynb. figures*.py draw, show.py prints, pipedream.py is for chapter 6."""
