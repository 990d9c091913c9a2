"""Refusals: why a site does not do what it was asked, or does not let out what it made.

A refusal that nobody's images are in may be told. One that depends on images is itself an answer about them ("this
holds NaN" may mean "this patient is among yours"), so a deployed site tells one sentence, and stops until a person has
looked (`layers/stopped.py`). `ParcelRejected` is of the first sort: something came that does not fit.
"""

from __future__ import annotations

import torch

from polyclinic.federation.ledger.parcel import ParcelRejected


class DataDependentRefusal(Exception):  # noqa: N818
    """A refusal that depends on the site's images. Raise it in any check that has looked at them: the host of a
    deployed site then suspends the study. Its text is for the site's own people."""


class Suspended(Exception):  # noqa: N818
    """The site answers nothing until a person there releases a study."""


class GateRefused(Exception):  # noqa: N818
    """A parcel that may not leave. Says which site, operation and kind, and why."""


class GateRefusedData(GateRefused, DataDependentRefusal):
    """A parcel that may not leave because of the numbers in it, which depend on the site's images."""


class LooksOn(ParcelRejected):
    """A site that looks at what came and does no work with it. What it has seen stays in its state."""


def may_depend_on_images(error: Exception, *, working: bool) -> bool:
    """Whether the coordinator could learn something about a site's images from the mere fact of this failure.

    Before the work (`working` is false) nothing has looked at them, unless a check says so. In the work, everything
    may have, but for what the site's policy refuses, what does not fit the study, and a machine that is full.
    """
    if isinstance(error, DataDependentRefusal):
        return True
    unrelated = (GateRefused, ParcelRejected, Suspended, OSError, MemoryError, torch.OutOfMemoryError)
    return working and not isinstance(error, unrelated)
