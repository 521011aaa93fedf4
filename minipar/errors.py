"""The two ways a job ends early on purpose."""


class UsageError(ValueError):
    """The user's input is wrong: every rank raises it, one rank prints one line, the job exits with code 2."""


class CommunicationError(RuntimeError):
    """A message had the wrong size, a peer died, a wait timed out, or no rank can go on."""
