"""The layout of a flight record file, for writers and readers.

    HEADER    who writes, and both clocks at one moment
    SIGNS     when the process last gave a sign of life, and when it closed the record
    stages    for each stage the rank that holds it, four bytes each
    RECORD    a ring of these: record n, from 1, is in place (n - 1) mod capacity

All numbers are little endian; a time of 0 means "not yet". Times are of the monotonic clock.
"""

from struct import Struct

import numpy as np

__all__ = [
    "AWAITED",
    "DOING",
    "END",
    "HEADER",
    "LATEST",
    "MAGIC",
    "MOST_MICROBATCHES",
    "MOST_RECORDS",
    "MOST_STAGES",
    "READY",
    "RECORD",
    "RECORD_TYPE",
    "SIGNS",
    "START",
    "TIME",
    "VERSION",
    "WAIT",
]

MAGIC = b"PSFLIGHT"
VERSION = 1
MOST_RECORDS = MOST_STAGES = 2**20
# Messages are labelled with 16 bits of their microbatch, so no step has more.
MOST_MICROBATCHES = 2**16
# No clock shows more seconds than this.
LATEST = 1e12

# magic, version, capacity, rank, stages, process, wall clock, monotonic clock, host, schedule
HEADER = Struct("<8s4IQ2d64s64s")
SIGNS = Struct("<2d")
# step, start, action, awaited message; the wait's begin and end, the action's end; number
RECORD = Struct("<qd16s16s3dq")
# The same, as the start of an action writes it: what lies between it and the number in one piece.
START = Struct("<qd16s40sq")
# kind, stage, microbatch, peer: those of an action, or the code of a phase and nothing else
DOING = Struct("<b3x3i")
# What a wait writes into its record, and the offsets of it and of the two end times.
WAIT = Struct("<16s2d")
TIME = Struct("<d")
AWAITED, READY, END = 32, 56, 64

_DOING_TYPE = np.dtype(
    {
        "names": ["kind", "stage", "microbatch", "peer"],
        "formats": ["i1", "<i4", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": DOING.size,
    }
)
RECORD_TYPE = np.dtype(
    [
        ("step", "<i8"),
        ("start", "<f8"),
        ("doing", _DOING_TYPE),
        ("awaited", _DOING_TYPE),
        ("since", "<f8"),
        ("ready", "<f8"),
        ("end", "<f8"),
        ("number", "<i8"),
    ]
)
