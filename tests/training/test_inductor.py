"""torch's compiler as we use it: files where nobody else can write, no processes, and no choice by a clock."""

import os
import stat

import pytest
import torch
from torch import nn

from polyclinic.training import inductor
from polyclinic.training.compiling import Compilation, CompiledNetwork


def test_compiled_code_lies_where_nobody_else_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(inductor.TORCH_CACHE, "")
    monkeypatch.delenv(inductor.TORCH_CACHE)
    inductor.inductor_options()
    folder = os.environ[inductor.TORCH_CACHE]
    assert folder.startswith(str(tmp_path / "cache" / "compiled"))
    if os.name != "nt":
        assert [os.stat(one).st_mode & 0o777 for one in (folder, os.path.dirname(folder))] == [0o700] * 2
    assert torch._inductor.codecache._HEADER_DIR.startswith(folder)
    monkeypatch.setenv(inductor.TORCH_CACHE, "")  # as if it were not set
    inductor.inductor_options()
    assert os.environ[inductor.TORCH_CACHE] == folder
    monkeypatch.setenv(inductor.TORCH_CACHE, str(tmp_path / "chosen"))
    inductor.inductor_options()
    assert os.environ[inductor.TORCH_CACHE] == str(tmp_path / "chosen")


@pytest.mark.skipif(os.name == "nt", reason="no modes of folders")
@pytest.mark.parametrize("case", ["writable", "a link", "in a writable one"])
def test_code_is_not_loaded_from_a_folder_of_others(monkeypatch, tmp_path, case):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    monkeypatch.setenv(inductor.TORCH_CACHE, "")
    monkeypatch.delenv(inductor.TORCH_CACHE)
    if case == "writable":
        (tmp_path / "compiled").mkdir()
        (tmp_path / "compiled").chmod(0o777)
    elif case == "in a writable one":
        tmp_path.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "compiled").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="can be written by others, .*code is loaded from there; "):
        CompiledNetwork(nn.Linear(3, 2).train(), Compilation(4))(torch.rand(4, 3))
    assert inductor.TORCH_CACHE not in os.environ


@pytest.mark.skipif(os.name == "nt", reason="no modes of folders")
@pytest.mark.parametrize(("mode", "own_group", "shared"), [(0o755, False, False), (0o777, True, True)])
def test_folders_in_which_others_can_replace_ours(mode, own_group, shared):
    group = os.getgid() if own_group else os.getgid() + 1
    for bits, wanted in ((mode, shared), (mode | stat.S_ISVTX, False), (0o775, not own_group)):
        found = os.stat_result((stat.S_IFDIR | bits, 0, 0, 1, os.getuid(), group, 0, 0, 0, 0))
        assert inductor._is_shared(found) is wanted


def test_torchs_compiler_gets_no_processes_and_no_clock(monkeypatch, tmp_path):
    monkeypatch.setenv(inductor.TORCH_CACHE, str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    options = inductor.inductor_options()
    assert torch._inductor.config.compile_threads == 1
    assert options["fallback_random"] is True
    assert options.get("deterministic", True) is True
