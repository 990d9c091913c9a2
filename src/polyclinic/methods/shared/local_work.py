"""How long a site trains in a round: settings that all methods share whose sites train by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from polyclinic.federation.site import Site
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet


class LocalWork(Settings):
    """Either so many steps, or so many passes over the site's images; one pass if neither is given."""

    local_steps: int | None = Field(
        None, ge=1, description="steps of a site in a round (or turn); one pass, floor(|D_k| / b), if not given"
    )
    local_epochs: int | None = Field(
        None,
        ge=1,
        description="passes of a site over its own images in a round (or turn), instead of local_steps: a large site "
        "takes more steps than a small one",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs both say how long a site trains; give one of them")
        return self

    def steps_at(self, site: Site, part: ImageSet | None = None) -> int:
        """Steps of a site in a round, on its training images or on `part`."""
        if self.local_steps is not None:
            return self.local_steps
        return (self.local_epochs or 1) * site.trainer.steps_in(site.data.train if part is None else part)
