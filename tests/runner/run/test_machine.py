"""Memory that steps free is kept in the process, unless somebody has chosen otherwise."""

from __future__ import annotations

import os
import sys

import pytest

from polyclinic.runner.run import machine as allocation


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


def test_many_processes_keep_no_more_than_a_share_of_the_memory(monkeypatch):
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 2**30 // 4096}
    monkeypatch.setattr(allocation.os, "sysconf", values.__getitem__)
    assert allocation.kept_at_end(1) == allocation.KEPT_AT_END
    assert allocation.kept_at_end(16) * 16 == 16 * 2**30 // 32
    assert allocation.kept_at_end(10_000) == allocation.AHEAD
