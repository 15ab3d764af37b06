"""Locks of open files: they end with the programs that hold them."""

import fcntl


def is_taken(file):
    """Takes the lock of an open file or directory, for this program and those that inherit it. Returns whether another has
    it; not where the file system has no locks, as some over a network: one at a time is for the user to see to there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
