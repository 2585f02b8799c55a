"""The one error type that both packages show to a user as a sentence, without a traceback."""


class Edge0Error(Exception):
    """A problem that the user can act on: its text names the field, the value and the fix.

    The command lines print it as `error: <text>` and exit with code 2. Anything else is a bug and keeps its
    traceback.
    """
