"""Memory that steps free is kept in the process, unless somebody has chosen otherwise."""

from __future__ import annotations

import os
import sys

import pytest

from polyclinic import allocation


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_a_user_chose_stays(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert not allocation.keep_freed_memory.__wrapped__()


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocation.keep_freed_memory.__wrapped__()


def test_a_c_library_without_these_options_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocation.ctypes, "CDLL", lambda name: object())
    assert not allocation.keep_freed_memory.__wrapped__()
