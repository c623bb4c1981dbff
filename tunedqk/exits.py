"""How a process came to its end."""

from __future__ import annotations

import signal

# What a process does to itself. Other signals are sent by somebody: the system out of memory, a person, a scheduler.
_CRASHES = {
    -getattr(signal, name)
    for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
}


def is_crash(status: int) -> bool:
    """Whether an exit status (with a minus, a signal) is the doing of what the process was at."""
    return status > 0 or status in _CRASHES


def cause(status: int) -> str:
    """An exit status in words."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"
