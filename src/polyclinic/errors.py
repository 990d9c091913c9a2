"""The two ways a command can end badly: the user's input, or the work itself; and a notice, with which it goes on."""


class BadInput(Exception):  # noqa: N818 - reads as a word of the project, not as a Python category
    """Input that cannot be used. The message is one sentence: what is at fault, and the cure. Exit code 2."""


class Damaged(BadInput):
    """A file that is missing, or is not what was written into it. The message names the file."""


class WorkFailed(Exception):  # noqa: N818
    """The input was fine but the work could not be finished. Exit code 1."""


class StorageFailed(WorkFailed):
    """A file that cannot be written, or is not whole, at the machine that does the work: no site's fault."""


class RunPaused(Exception):  # noqa: N818
    """A run ends here on purpose, at a checkpoint, to be resumed; no failure of anybody's."""


class Notice(UserWarning):
    """Something a user should know, in one sentence; the work goes on. Commands print it on stderr."""


def did_you_mean(word: str, choices: list[str]) -> str:
    """A hint for a misspelt word: ` (did you mean 'x'?)`, or nothing."""
    import difflib  # only who has something to say pays for it

    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
