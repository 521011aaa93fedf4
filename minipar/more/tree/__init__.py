"""Sums as balanced trees: the same bits in every layout."""
