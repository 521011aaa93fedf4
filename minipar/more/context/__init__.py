"""Attention in blocks; and context parallelism: each rank has a part of every sample's tokens."""
