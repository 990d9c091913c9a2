"""Files of first weights: what is read, what a network takes over, what is refused."""

import hashlib
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from polyclinic import models
from polyclinic.errors import BadInput
from polyclinic.models import read_weights


def drawn(outputs: int = 2) -> dict[str, torch.Tensor]:
    return models.initial_weights(lambda: models.build("lenet5", channels=1, outputs=outputs, size=28), 1)


def other(outputs: int = 2) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in drawn(outputs).items()}


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module."])
def test_torch_files_and_safetensors_give_the_same_weights_and_the_digest_of_the_file(tmp_path, wrap):
    weights = other()
    save_file(weights, tmp_path / "w.safetensors")
    inside = {f"module.{n}": t for n, t in weights.items()} if wrap == "module." else weights
    torch.save({"state_dict": inside, "epoch": 3} if wrap == "state_dict" else inside, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        file = read_weights(tmp_path / name)
        assert file.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        fitted = file.fitted(drawn(), "lenet5")
        assert list(fitted.weights) == list(drawn())
        assert all(torch.equal(fitted.weights[n], weights[n]) for n in weights)
        assert fitted.sentence() == "10 of 10 tensors loaded"


def test_what_fits_is_taken_over_as_float32_and_the_rest_is_named(tmp_path):
    weights = {n: t.half() for n, t in other(outputs=5).items() if n != "conv1.bias"}
    weights |= {"fc9.weight": torch.ones(2), "conv2.bias": torch.ones(16, dtype=torch.int64)}
    save_file(weights, tmp_path / "w.safetensors")
    fitted = read_weights(tmp_path / "w.safetensors").fitted(drawn(), "lenet5")
    assert fitted.other_shape == ("conv2.bias", "fc3.weight", "fc3.bias")
    assert (fitted.missing, fitted.unused) == (("conv1.bias",), ("fc9.weight",))
    for name, tensor in drawn().items():
        wanted = weights[name].float() if name in fitted.loaded else tensor
        assert torch.equal(fitted.weights[name], wanted), name
        assert fitted.weights[name].dtype == torch.float32
    words = fitted.sentence()
    assert words.startswith(
        "6 of 10 tensors loaded; 3 drawn at random, as their shape or kind differs (conv2.bias, fc3.weight,"
    )
    assert words.endswith("1 in the file not used (fc9.weight)")
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in other().items()}, tmp_path / "parameters.pt")
    fitted = read_weights(tmp_path / "parameters.pt").fitted(drawn(), "lenet5")
    assert not any(tensor.requires_grad for tensor in fitted.weights.values())
    torch.save({"fc3.bias": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "eight.pt")
    fitted = read_weights(tmp_path / "eight.pt").fitted(drawn(), "lenet5")
    assert torch.equal(fitted.weights["fc3.bias"], torch.ones(2))


@pytest.mark.parametrize("odd", [
    lambda tensor: tensor.to_sparse(), lambda tensor: tensor.to("meta"), lambda tensor: tensor.to(torch.complex64),
    lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
])  # fmt: skip
def test_tensors_that_are_not_ordinary_numbers_are_not_taken_over(tmp_path, odd):
    torch.save({**other(), "fc3.weight": odd(other()["fc3.weight"])}, tmp_path / "w.pt")
    fitted = read_weights(tmp_path / "w.pt").fitted(drawn(), "lenet5")
    assert fitted.other_shape == ("fc3.weight",)
    assert torch.equal(fitted.weights["fc3.weight"], drawn()["fc3.weight"])


class Dangerous:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("nowhere.pt", None, r"model\.weights: '.*nowhere\.pt' cannot be read \(No such file"),
    ("text.pt", b"hello", r"^model\.weights: '.*text\.pt' is not a file of weights; name a \.safetensors file, or"),
    ("text.txt", b"hello", r"'.*text\.txt' is not a file of weights"),
    ("pickle.pt", pickle.dumps({"a": 1}), r"'.*pickle\.pt' holds other objects than tensors, or is damaged"),
    ("text.safetensors", b"hello", r"is not a safetensors file, or is damaged"),
    ("code.pt", {"a": Dangerous()}, r"holds other objects than tensors, .* write it again with torch\.save\("),
    ("network.pt", torch.nn.Linear(2, 2), r"holds other objects than tensors"),
    ("empty.pt", {"epoch": 3}, r"holds no named tensors"),
])  # fmt: skip
def test_other_files_are_refused_and_nothing_in_them_runs(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(BadInput, match=message):
        read_weights(tmp_path / name)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_a_damaged_archive_and_a_small_file_of_a_large_tensor_are_refused(tmp_path):
    file = tmp_path / "damaged.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(range(256)) * 4)
    content = file.read_bytes()
    overwritten, unknown = content[:60] + b"\xff" * 40 + content[100:], content.replace(b"\x08\x00", b"\x63\x00")
    for damaged in (overwritten, unknown, content[:200]):
        file.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"damaged\.pt' (holds other objects than|is not a file of weights)"):
            read_weights(file)
    torch.save({"conv1.bias": torch.ones(1).expand(2**40)}, tmp_path / "expanded.pt")
    with pytest.raises(BadInput, match=r"'conv1\.bias' in '.*expanded\.pt' is larger than the file"):
        read_weights(tmp_path / "expanded.pt")
    torch.save({"conv1.bias": torch.zeros(2**16)}, tmp_path / "plain.pt")
    assert read_weights(tmp_path / "plain.pt").tensors["conv1.bias"].shape == (2**16,)
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(BadInput, match=r"packed\.pt' holds other objects than tensors, or is damaged"):
        read_weights(tmp_path / "packed.pt")


def test_a_file_of_another_network_and_one_that_is_not_finite_are_refused(tmp_path):
    save_file({"layer1.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(BadInput, match=r"no tensor of .* fits lenet5: the file has layer1\.weight, the network conv1"):
        read_weights(tmp_path / "other.safetensors").fitted(drawn(), "lenet5")
    save_file({"conv1.bias": torch.full((6,), torch.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(BadInput, match=r"'conv1\.bias' in .* is not finite"):
        read_weights(tmp_path / "nan.safetensors").fitted(drawn(), "lenet5")
    save_file({"conv1.bias": torch.full((6,), 1e300, dtype=torch.float64)}, tmp_path / "large.safetensors")
    with pytest.raises(BadInput, match=r"'conv1\.bias' in .* is not finite"):  # as float32
        read_weights(tmp_path / "large.safetensors").fitted(drawn(), "lenet5")
