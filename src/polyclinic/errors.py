"""The two ways a command can end badly: the user's input, or the work itself."""


class BadInput(Exception):  # noqa: N818 - reads as a word of the project, not as a Python category
    """Input that cannot be used. The message is one sentence: what is at fault, and the cure. Exit code 2."""


class WorkFailed(Exception):  # noqa: N818
    """The input was fine but the work could not be finished. Exit code 1."""
