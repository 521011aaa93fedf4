"""Mixtral, and expert parallelism: each rank has some of every layer's experts."""
