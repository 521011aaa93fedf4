"""Tensor and sequence parallelism: one layer on several ranks. Read mappings.py, layers.py, plan.py."""
