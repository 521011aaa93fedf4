"""The package of pictures, which lies beside minipar in a checkout and inside it where minipar is installed."""

from importlib.util import find_spec


def full_name(module: str) -> str:
    """Return the name to import `visualize`, or a module in it, by."""
    if find_spec("minipar.visualize") is None:
        return module
    return f"minipar.{module}"
