"""The serial model: modules, GPT-2, Llama, Mixtral, optimizers. Nothing here depends on the number of ranks."""

import lazy_loader

# The names are in __init__.pyi, which editors and type checkers read, too. Each is imported when it
# is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
