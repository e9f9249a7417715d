"""The one error a user is meant to see."""


class BadInput(ValueError):
    """Input the user can mend: the message is one line naming the file, the key, the value and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """
