"""Tensors with gradients: read rules.py, tensor.py, backward.py, fused.py, attention.py in turn."""

import lazy_loader

# The names are in __init__.pyi, which editors and type checkers read, too. Each is imported when it
# is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
