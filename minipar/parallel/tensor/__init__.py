"""Tensor and sequence parallelism: one layer on several ranks. Read mappings.py, then layers.py, then plan.py."""
