"""Starting processes as a user does."""

import signal


def heed_interrupts():
    """For ``preexec_fn``: a shell lets its background jobs ignore Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
