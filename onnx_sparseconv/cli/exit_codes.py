"""Exit codes of the command line; they are part of its interface."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """What a command ends with."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    OUTPUTS_DIFFER = 3
    NOTHING_QUALIFIED = 4
    PROVIDER_NOT_USED = 5
    CONFLICTING_INSTALLATION = 6
    NO_GAIN = 7


# The shell's convention for a process that was interrupted (128 + SIGINT); not a result, so not an `ExitCode`.
INTERRUPTED = 130

_WORST_FIRST = (
    ExitCode.USAGE,
    ExitCode.ERROR,
    ExitCode.CONFLICTING_INSTALLATION,
    ExitCode.PROVIDER_NOT_USED,
    ExitCode.OUTPUTS_DIFFER,
    ExitCode.NO_GAIN,
    ExitCode.NOTHING_QUALIFIED,
    ExitCode.DONE,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code that counts where several models gave one each; `ExitCode.DONE` for none at all."""
    return min(codes, key=_WORST_FIRST.index, default=ExitCode.DONE)
