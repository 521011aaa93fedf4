"""minipar: how large Transformers are trained across many machines, in Python one can read.

The public names, in one place. Each is imported from its file when it is first used, so `import
minipar` is quick and changes nothing in the process. Each package imports only from those after it:
plan, bench and compare, then train, more, parallel (strategies applied to a serial model), nn and
comm, which do not know each other, autograd, backend.
"""

import lazy_loader

__version__ = "0.2.0"

# The names are in __init__.pyi, which editors and type checkers read, too. Each is imported when it
# is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
