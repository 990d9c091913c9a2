"""Sums of clipped gradients: of a batch's rows (ghost clipping, or a stored gradient of each), or of its patients."""

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from polyclinic.errors import WorkFailed
from polyclinic.privacy import ghost_clipping
from polyclinic.privacy.ghost_clipping import TINY, GhostClipping, NotFollowedError, can_follow

#: ghost: no gradient of a single image is stored, where the network allows that; stored: each one is (Opacus)
Clipping = Literal["ghost", "stored"]
#: tensors [B, ...] of one batch, for instance images and targets; B may be 0
Batch = tuple[Tensor, ...]
#: the loss of each row of a batch, [B]
Losses = Callable[..., Tensor]
#: makes a CUDA graph of a function (`training.gpu.graphs.GraphedFunction`)
Record = Callable[[Callable[..., list[Tensor]]], Callable[..., list[Tensor]]]

#: rows that go through a network at a time; a larger batch goes through in pieces
MOST_ROWS = 256
#: bytes that the rows of a piece may take, by kind of device
ROOM = {"cpu": 2**30, "cuda": 2**33}
#: recorded pieces have a multiple of so many rows: a graph is recorded for each number of rows
ROWS_IN_GRAPH = 16


class Sums(Protocol):
    """Computes sums of clipped gradients, of rows (`ClippedSums`) or of patients (`PatientSums`)."""

    @property
    def ghost(self) -> bool: ...
    def following(self) -> contextlib.AbstractContextManager[None]: ...
    def total(
        self, losses: Losses, pieces: Iterable[Batch], clip: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]: ...


class ClippedSums:
    """Computes sums of clipped gradients of `module`.

    With `record` the work on a piece is recorded as a CUDA graph; `losses` must then be the same at every call.
    """

    def __init__(self, module: nn.Module, clipping: Clipping = "ghost", record: Record | None = None) -> None:
        self.module, self.record = module, record
        self._ghost = GhostClipping(module) if clipping == "ghost" and can_follow(module) else None
        self._recorded: dict[float, Callable[..., list[Tensor]]] = {}
        self._rows: int | None = None
        self._contexts = contextlib.ExitStack()

    @property
    def ghost(self) -> bool:
        """True for ghost clipping: lengths are exact then, whatever precision the passes have."""
        return self._ghost is not None

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """A while in which `total` may be called."""
        with contextlib.ExitStack() as self._contexts:
            if self._ghost is not None:
                self._contexts.enter_context(self._ghost.following())
            else:
                self._store_gradients()
            yield

    def total(
        self, losses: Losses, pieces: Iterable[Batch], clip: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """For each of the parameters, the sum of the clipped gradients of all rows of a batch, in pieces."""
        # zero times infinity is no number, and no gradient is longer than the largest one
        clip = min(clip, torch.finfo(torch.float32).max)
        totals: list[Tensor] = []
        split = (self._split(losses, batch, parameters) for batch in pieces if len(batch[0]))
        for number, piece in enumerate(itertools.chain.from_iterable(split)):
            if number == 1:  # the next replay of a graph overwrites what the first one gave
                totals = [one.clone() for one in totals]
            sums = self._sums(losses, piece, clip, parameters)
            totals = list(torch._foreach_add(totals, sums)) if number else sums
        return totals or [torch.zeros_like(one) for one in parameters]

    def _split(self, losses: Losses, batch: Batch, parameters: list[nn.Parameter]) -> Iterator[Batch]:
        if self._rows is None:
            self._rows = self._rows_at_a_time(losses, batch, parameters)
        return zip(*(tensor.split(self._rows) for tensor in batch), strict=True)

    def _rows_at_a_time(self, losses: Losses, batch: Batch, parameters: list[nn.Parameter]) -> int:
        """By the memory that one row takes; it depends on shapes only, so that the result does."""
        room = ROOM.get(batch[0].device.type, ROOM["cpu"])
        if self._ghost is not None:
            try:
                one_row = self._ghost.bytes_of(lambda: _checked(losses, tuple(one[:1] for one in batch)))
                return _rows_in(room, one_row)
            except NotFollowedError:
                self._store_gradients()
        weights = sum(one.numel() * one.element_size() for one in parameters)
        return _rows_in(room, weights)

    def _sums(self, losses: Losses, piece: Batch, clip: float, parameters: list[nn.Parameter]) -> list[Tensor]:
        if self._ghost is None:
            return self._stored.clipped_sums(lambda: _checked(losses, piece), clip, parameters)
        if self.record is None:
            return self._ghost.clipped_sums(lambda: _checked(losses, piece), clip, parameters)
        ghost = self._ghost
        if clip not in self._recorded:
            self._recorded[clip] = self.record(
                lambda counted, *rows: ghost.clipped_sums(lambda: _checked(losses, rows), clip, parameters, counted)
            )
        rows = len(piece[0])
        missing = math.ceil(rows / ROWS_IN_GRAPH) * ROWS_IN_GRAPH - rows
        counted = torch.arange(rows + missing, device=piece[0].device) < rows
        return self._recorded[clip](counted, *(padded(one, missing) for one in piece))

    def _store_gradients(self) -> None:
        self._contexts.close()
        self._ghost, self._stored = None, StoredGradients(self.module)
        self._contexts.enter_context(self._stored.following())


def _rows_in(room: int, one_row: int) -> int:
    """Rows that go into so many bytes, where one row takes `one_row`; at least one, though it may not fit."""
    return max(1, min(MOST_ROWS, room // one_row)) if one_row else MOST_ROWS


def padded(rows: Tensor, missing: int) -> Tensor:
    """[B, ...] with the first row `missing` times more behind the others."""
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


def _checked(losses: Losses, piece: Batch) -> Tensor:
    found = losses(*piece)
    if found.shape != (len(piece[0]),):
        raise ValueError(f"losses gave {tuple(found.shape)} for {len(piece[0])} rows; give one loss a row")
    return found


# --- patients -------------------------------------------------------------------------------------------------


class PatientSums:
    """Computes sums of clipped gradients, of which every patient has one. The last tensor of a batch, int64 [B], says
    whose each row is; it is not given to `losses`. A piece of a batch holds all rows of its patients."""

    @property
    def ghost(self) -> bool:
        """False: passes are in float32, as lengths are computed from what they give."""
        return False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        yield

    def total(
        self, losses: Losses, pieces: Iterable[Batch], clip: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """For each of the parameters, the sum of the clipped gradients of all patients of a batch."""
        totals = [torch.zeros_like(one) for one in parameters]
        for *rows, patients in pieces:
            for patient in patients.unique():
                own = [tensor[(patients == patient).to(tensor.device)] for tensor in rows]
                torch._foreach_add_(totals, _clipped(_gradients(losses, own, parameters), clip))
        return totals


def _gradients(losses: Losses, rows: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of the summed loss of these rows, a piece at a time; zeros where a parameter took no part."""
    totals = [torch.zeros_like(one) for one in parameters]
    for piece in zip(*(tensor.split(MOST_ROWS) for tensor in rows), strict=True):
        found = torch.autograd.grad(losses(*piece).sum(), parameters, allow_unused=True)
        for total, gradient in zip(totals, found, strict=True):
            if gradient is not None:
                total += gradient
    return totals


def _clipped(gradients: list[Tensor], clip: float) -> list[Tensor]:
    """Gradients as one vector, no longer than `clip`. A patient whose gradient is not finite counts as one without:
    whoever is refused for it would learn that the patient is there."""
    length = torch.stack([one.double().norm() for one in gradients]).norm()
    if not bool(length.isfinite()):
        return [torch.zeros_like(one) for one in gradients]
    factor = float((clip / (length + TINY)).clamp(max=1.0))
    return [factor * one for one in gradients]


class StoredGradients:
    """Gives sums of clipped gradients of `module`, while its passes are followed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        from opacus import GradSampleModule  # takes a second

        hooked = GradSampleModule(self.module, loss_reduction="sum")
        hooked.GRAD_SAMPLERS = {**hooked.GRAD_SAMPLERS, nn.Conv2d: _convolution}
        hooked.forbid_grad_accumulation()
        try:
            with warnings.catch_warnings():
                # the first layer's input is an image, which needs no gradient
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            hooked.to_standard_module()
            for parameter in self.module.parameters():
                parameter.grad = None

    def clipped_sums(self, losses: Callable[[], Tensor], clip: float, parameters: list[Any]) -> list[Tensor]:
        """For each of the parameters, the sum over rows of their gradients, each row's clipped to `clip`.

        `losses()` runs the network and gives the loss of each row, [B].
        """
        for parameter in self.module.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        found = losses()
        found.sum().backward()
        rows = [_rows(one, len(found)) for one in parameters]
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]
        _drop_non_finite(rows)
        lengths = torch.stack([one.reshape(len(one), -1).norm(2, dim=-1) for one in rows], dim=1).norm(2, dim=1)
        factors = (clip / (lengths + TINY)).clamp(max=1.0)
        return [torch.einsum("i,i...", factors.to(one.dtype), one) for one in rows]


def _convolution(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Opacus' gradients per image, where they are right: it takes images to be padded with zeros, and rows of pixels to
    lie next to each other in memory, and gives wrong numbers for others without a word."""
    if layer.padding_mode == "zeros":
        from opacus.grad_sample.conv import compute_conv_grad_sample

        return dict(compute_conv_grad_sample(layer, [one.contiguous() for one in activations], backprops))
    stored = ghost_clipping.outer_products(layer, activations[0], backprops).stored()
    found = {layer.weight: ghost_clipping.as_weight(stored.rows, (len(backprops), *layer.weight.shape), stored.kernel)}
    return found if layer.bias is None else {**found, layer.bias: backprops.sum((2, 3))}


def _rows(parameter: Any, count: int) -> Tensor:
    """The gradients of a parameter for each image; zeros where it took no part in the loss."""
    rows = parameter.grad_sample
    if rows is None:
        return parameter.new_zeros(count, *parameter.shape)
    if len(rows) != count:
        raise WorkFailed(
            f"a layer gets {len(rows)} rows for {count} images, so that one image's share cannot be bounded; choose a "
            "network whose layers get one row for each image"
        )
    return rows


def _drop_non_finite(rows: list[Tensor]) -> None:
    """An image whose gradient is not finite counts as one without a gradient: NaN has no length to clip, and a parcel
    that is refused for it would tell that the image is there. Nothing counts such images, for the same reason."""
    finite = torch.stack([one.flatten(1).isfinite().all(1) for one in rows]).all(0)
    if not bool(finite.all()):
        for one in rows:
            one[~finite] = 0.0
