"""Names of the ways in which numbers travel (`engine.wire`); `wire_codec.py` has what they do."""

from __future__ import annotations

from typing import Literal

Encoding = Literal["exact", "fp16", "int8", "delta"]
#: encodings of which the receiver gets other numbers than were sent
ROUNDING = frozenset({"fp16", "int8"})
