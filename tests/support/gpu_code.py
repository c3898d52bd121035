"""What becomes of the library's PTX on a GPU."""

from __future__ import annotations


def with_ordered_metadata(ptx: bytes) -> bytes:
    """What the library hands to the driver of a GPU of compute capability 10.0 and later."""
    return ptx.replace(b"\n.version 8.1\n", b"\n.version 8.5\n").replace(
        b"mma.sp.sync", b"mma.sp::ordered_metadata.sync"
    )
