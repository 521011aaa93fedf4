"""The end of a process, which a test sees as an exception: see the fixture `ends` in tests/robust_start/conftest.py."""


class Ended(BaseException):
    """Raised where the process would end."""
