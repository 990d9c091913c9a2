"""The lists of layers: what a site does around an operation, and the coordinator around a reply, in this order.

The lists are the specification. Each is passed from the first line to the last; `arriving` before the work, `working`
around it, `leaving` before anything is sent, `left` after. A layer that raises refuses. One with
nothing to do in a study is left out of its run (`Layer.is_needed`). Nobody else asks whether a site is deployed. No
study and no coordinator adds, moves or removes a layer; a site's own people may add some that refuse (`OwnLayers`).
"""

from typing import NamedTuple

from polyclinic.federation.layers import replies
from polyclinic.federation.layers.call_checks import (
    Begin,
    CallOrder,
    CountersignedHead,
    ExpectedForm,
    OpenedSite,
    OwnArguments,
    OwnName,
    RoundOfStudy,
    SumSteps,
    TakenByHospital,
    TakenCall,
    Unsealed,
)
from polyclinic.federation.layers.cohort import Archive, DrawnPatients, NotedBatches, RandomShares
from polyclinic.federation.layers.defence_and_poisoning import Defended, Poisoned
from polyclinic.federation.layers.gate import Reservation, ThroughGate
from polyclinic.federation.layers.incoming import Inspection
from polyclinic.federation.layers.interface import Layer, OwnLayers
from polyclinic.federation.layers.leaving import (
    CoarseScores,
    CoveredByPrivacy,
    Declared,
    Difference,
    HiddenSamples,
    Rounding,
    ScoredOnce,
    Sum,
    Transcript,
)
from polyclinic.federation.layers.suspension import Stopped

Kinds = tuple[type[Layer], ...]


class Lists(NamedTuple):
    """The layers of a site by what they see; one object of each serves all four lists."""

    arriving: Kinds
    working: Kinds
    leaving: Kinds
    left: Kinds


SIMULATED = Lists(
    arriving=(
        TakenCall,  # the operation takes what came, and may answer to who asks
        SumSteps,  # a step of a sum belongs to the study's sums
        OpenedSite,
        Begin,  # from here on a failure undoes what changed at the site
        Unsealed,  # what another site sealed is opened
        ExpectedForm,  # names, shapes and dtypes
        Inspection,  # numbers, rows, movement of weights
        Archive,
    ),
    working=(NotedBatches, RandomShares),
    leaving=(
        CoveredByPrivacy,  # trained privately where the study wants that
        Inspection,  # how far own training moves weights
        Defended,
        Poisoned,
        CoarseScores,
        Declared,  # kinds that the operation declares; what it `made` is this
        HiddenSamples,  # how many images an answer is of, where the policy hides that
        Sum,  # whole numbers of a sum, after finite numbers and raw images were looked for
        Rounding,  # the same, and then fewer digits
        Difference,
        ThroughGate,  # kind, cohort, finite, raw images, encoding; seal; budgets; the line of the ledger
    ),
    left=(Archive,),
)

DEPLOYED = Lists(
    arriving=(
        OwnName,  # one host serves one site
        Stopped,  # approved, and no study waits for a person
        TakenByHospital,  # the operation takes what came; nothing of simulations, no scores of training images
        SumSteps,
        RoundOfStudy,
        OpenedSite,
        CountersignedHead,  # the head of the ledger that the coordinator signed
        CallOrder,  # once a round, in order, beginning with the weights that were scored
        ScoredOnce,  # figures of test images are about one model
        Reservation,  # budgets set aside before an image is looked at
        Begin,
        Unsealed,
        ExpectedForm,
        OwnArguments,  # each argument has the operation's kind, and weights have all names
        Inspection,
        OwnLayers,
        Archive,
        Transcript,  # seeds of private noise depend on all that was asked
    ),
    working=(NotedBatches, RandomShares),
    leaving=(
        CoveredByPrivacy,
        Inspection,
        Defended,
        Poisoned,
        CoarseScores,  # no scores of training images, others in coarse steps, no training loss
        Stopped,  # as it may have been since the call began
        Declared,
        DrawnPatients,  # enough patients in the batches that were drawn
        CallOrder,  # scores once a round
        OwnLayers,
        HiddenSamples,  # how many images an answer is of, where the site's policy hides that
        Sum,
        Rounding,
        Difference,
        ThroughGate,
    ),
    left=(CallOrder, ScoredOnce, OwnLayers, Archive),
)

#: what the coordinator does with a reply, before the method sees it; a refusal is the failure of that site
COORDINATOR = (
    replies.checked,  # from the site that was asked: a row of a sum; or kinds, form, numbers, what the method wants
    replies.checked_keys,  # and the site's public key is its own
    replies.written_down,  # the head of its ledger, which goes on from the known one; bytes, and privacy
)
