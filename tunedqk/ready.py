"""The binaries that this process has bound to slots: what a warm call finds, and a cold one adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tunedqk.errors import CaptureError

if TYPE_CHECKING:
    from tunedqk.call import Slot
    from tunedqk.launch import Binary

binaries: dict[Slot, Binary] = {}


def make_ready(slot: Slot) -> Binary:
    """The cold path of a call: find, tune or validate, and remember."""
    if slot.device >= 0 and torch.cuda.is_current_stream_capturing():
        return _ready_for_capture(slot)
    from tunedqk.resolve import resolver_for  # what tunes and validates, imported when something is

    resolver = resolver_for(slot.place)
    with resolver.lock:
        if slot not in binaries:  # another thread may have been here
            with torch.inference_mode(mode=False), torch.no_grad():
                binaries[slot] = resolver.resolve(slot.variant, slot.key, slot.config)
    return binaries[slot]


def _ready_for_capture(slot: Slot) -> Binary:
    """During a capture nothing can be validated: any accepted binary of the variant does. That of the nearest key."""

    def distance(other: Slot) -> tuple[bool, int]:
        return other.sequences != slot.sequences, abs(other.seq_len.bit_length() - slot.seq_len.bit_length())

    known = list(binaries)  # other threads may add to it
    fitting = [other for other in known if other[:2] == slot[:2] and slot.config in (None, other.config)]
    if fitting:
        return binaries[min(fitting, key=distance)]
    raise CaptureError(
        f"{slot.key} ({slot.variant}): no accepted binary is ready, and a CUDA graph is being "
        "captured. Make one such call, or call tunedqk.warmup, before the capture; "
        f"`{slot.key.command}` makes that short."
    )
