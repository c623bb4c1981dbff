"""Every exception and warning that is tunedqk's own.

Bad arguments are plain `TypeError` and `ValueError`; what is here concerns tuning, validation and the tuning DB. Each
message says what happened, to which key or config, and what to do.
"""


class TunedQKError(RuntimeError):
    """Base class of the package's errors."""


class NoAcceptedConfigError(TunedQKError):
    """No candidate for a key compiled and agreed with the loop kernel."""


class RejectedConfigError(TunedQKError):
    """One config did not compile, or did not agree with the loop kernel; `verdict` says which."""

    def __init__(self, message: str, verdict: str = "") -> None:  # unpickling passes the message alone
        super().__init__(message)
        self.verdict = verdict


class CrashedError(TunedQKError):
    """A binary on trial cost this process its GPU context: only a new process can use the GPU again."""


class WorkerError(TunedQKError):
    """The process that pretunes could not be started."""


class CompilerCrashedError(TunedQKError):
    """Compiling a config took the compiler's process down."""


class MissingConfigError(TunedQKError):
    """`TUNEDQK_MODE=strict`, and no validated winner is stored for the key."""


class CaptureError(TunedQKError):
    """A call inside a CUDA graph capture needs a binary that was not validated before the capture."""


class TuningDBWarning(UserWarning):
    """A tuning DB file could not be read, or could not be written."""


class TuningDeclinedError(TunedQKError):
    """Too little memory is free to tune; the call goes on with another validated config."""
