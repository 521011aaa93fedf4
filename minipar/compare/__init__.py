"""Whether two recorded runs are equal, or where they part, by which factor, and why.

It only reads files.

The picture of a comparison is in visualize/comparison.py.
"""
