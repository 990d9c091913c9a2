"""The observer of a run: told what happens in it, and asked to score models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from polyclinic.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from polyclinic.federation.call import Failure
    from polyclinic.federation.federation import Federation


class Observer:
    """This one does nothing; `runner.recorder.Recorder` scores models, keeps the best and writes the history."""

    #: the weights of the best round so far, which a checkpoint keeps
    best_weights: dict[str, Tensor] | None = None

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        """Sites are about to be asked for an operation."""

    def failed(self, failure: Failure) -> None:
        """A site has failed."""

    def warned(self, sentence: str) -> None:
        """Something in the run went otherwise than the study asked."""

    def evaluate(self, federation: Federation, weights: Mapping[str, Tensor] | None) -> None:
        """A method has a model that may be scored in this round; without weights, each site has its own."""

    def rounds_without_progress(self, federation: Federation) -> int:
        """Rounds since the best validation score; 0 where nothing was scored."""
        return 0

    def handed_over(self, federation: Federation, site: str, weights: Mapping[str, Tensor]) -> None:
        """A site has finished its turn with these weights."""

    def round_done(self, federation: Federation, rounds: int, seconds: float) -> None:
        """One of `rounds` rounds is over."""

    def memory(self) -> JsonObject:
        """What a checkpoint keeps of the observer besides the best weights, as JSON values."""
        return {}

    def restore(self, memory: JsonMapping, best: dict[str, Tensor] | None) -> None:
        """Take over what `memory` gave, and the best weights."""
