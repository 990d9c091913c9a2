"""Names of types for what is read from JSON and TOML files, or is about to be written to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: an object of JSON, or a table of TOML: its values are None, bools, numbers, texts, lists and such objects
JsonObject = dict[str, Any]
#: the same where it is only read
JsonMapping = Mapping[str, Any]
