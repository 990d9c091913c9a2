"""Operations: what a method may ask of a site, the kinds of parcel that each one releases, plans of its work, and a
transaction, which is one operation at one site.

An operation that trains is a generator function, a *site half*. It yields a plan, gets back what came of it, and
returns its parcels:

    fitted = yield Fit(site, start, spec)
    return release(site, fitted)

It says once what one site does. Whoever carries out the plans may stack those of several sites.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from polyclinic.federation.call import AS_SENT, Call
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.site import Site, SiteState

#: taken as an argument: weights up to the study's cut, and not of all of the network
FRONT = "front"
#: numbers of a parcel that a kind small by nature may have, for each class and one more: scores have 2,048 bins a class
SMALL = {"metrics": 2**14, "statistics": 2**14}
#: the same of a plug-in's kind that its operation declares nothing of
OF_A_PLUGIN = 2**14
#: numbers of sums of products of features, and of what else is as large as a network
AS_LARGE_AS_A_NETWORK = 2**28
Partner = Literal["coordinator", "sites", "simulator"]


class Operation(NamedTuple):
    """What a method declares of something it may ask of a site. What is not declared has the strictest meaning."""

    releases: tuple[str, ...]
    takes: Mapping[str, str]
    splits: tuple[str, ...]
    repeats: bool
    partner: Partner
    plan: "type[Plan] | None"
    address: str
    most: Mapping[str, int | Callable[[Any, Site], int]] = {}

    def kind_of(self, argument: str) -> str:
        """The kind of parcel that the operation takes as this argument."""
        kind = self.takes.get(argument, argument.replace("_", "-"))
        return "weights" if kind == FRONT else kind

    def too_many(self, kind: str, numbers: int, trainer: TrainerLike) -> str:
        """A sentence where a parcel has more numbers than its operation declares, or than its kind has by nature."""
        small = SMALL.get(kind, numbers if kind in KINDS.builtin else OF_A_PLUGIN)
        if numbers <= small or self.partner == "simulator":
            return ""
        most: Any = self.most.get(kind, small * (len(getattr(trainer.target, "classes", None) or ()) + 1))
        if callable(most) or numbers <= most:  # a function of the site is for its gate
            return ""
        cure = f"where it needs them, write @operation(..., most={{'{kind}': {numbers}}})"
        return f"{numbers} numbers, and '{self.address}' declares at most {most} of {kind}; {cure}"


def signature_of(work: Callable) -> inspect.Signature:
    """What an operation takes; looked up once, since every call asks for it."""
    return _signature(getattr(work, "__func__", work), hasattr(work, "__self__"))


@functools.cache
def _signature(function: Callable, is_bound: bool) -> inspect.Signature:
    found = inspect.signature(function)
    return found.replace(parameters=list(found.parameters.values())[1:]) if is_bound else found


def operation(
    *releases: str,
    takes: Mapping[str, str] | None = None,
    splits: tuple[str, ...] = ("train",),
    repeats: bool = False,
    partner: Partner = "coordinator",
    plan: "type[Plan] | None" = None,
    address: str | None = None,
    most: Mapping[str, int | Callable[[Any, Site], int]] | None = None,
) -> Callable:
    """Marks a function of a method as an operation that releases parcels of the named kinds.

    `takes`: the kinds of parcel that it takes, by argument, where an argument is not named like its kind ("front" for
    weights up to the study's cut); a deployed site refuses any other kind. `splits`: the site's images that its release
    is computed from, where no argument `split` says so; scores of training images never leave a deployed site.
    `repeats`: it may be asked several times a round, as the steps of split learning are; a deployed site does any other
    operation that releases something once a round. `partner`: who is at the other end. What is between sites comes
    sealed from another one, or leaves sealed for it, and the coordinator has none of it; what is for the simulator
    exists in simulation only. `plan`: the kind of plan that the function yields first, where plans of several simulated
    sites may be carried out together (`engine.stacked`). `address`: what random draws are addressed by instead of the
    function's name, so that a function can be renamed and its draws stay the same. `most`: numbers of a parcel by kind,
    where metrics or statistics have more than few (`SMALL`), weights, gradients or a generator more than the model,
    codes or synthetic images more than a few for each pixel; of other kinds also a function of the method and the site.

    Answers that the coordinator needs the mean or the sum of only are named in the method's table `SUMMED`.
    """

    def mark(function: Callable) -> Callable:
        named = address or function.__name__
        declared = Operation(releases, dict(takes or {}), splits, repeats, partner, plan, named, dict(most or {}))
        function.operation = declared  # type: ignore[attr-defined]
        return function

    return mark


Released = TypeVar("Released")
#: a site half that yields plans and returns parcels
Work = Generator[Any, Any, Released]


class Plan(Protocol):
    """Work at one site. An operation names the kind of plan that it yields first (`plan=`)."""

    divides: ClassVar[bool]  #: plans of many sites may be carried out in groups, or one by one where a group fails

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        """Whether so many simulated sites may hand in such plans at once; otherwise each works by itself. `noted`:
        somebody wants to know which images of its trainer each site used, or each has random shares of its own."""

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[Any]:
        """What came of each plan; several are stacked where that can be and pays."""


def carry_out(begun: Sequence[Any]) -> list[Any]:
    """What each site half returns; one that yields no plan has returned already. Those that wait at plans of one kind
    have them carried out together."""
    returned = list(begun)
    answers: dict[int, Any] = {}
    for place, half in enumerate(begun):
        if isinstance(half, Generator):
            answers[place] = None
    try:
        while answers:
            waiting: dict[type[Plan], dict[int, Any]] = {}
            for place, answer in answers.items():
                try:
                    plan = begun[place].send(answer)
                except StopIteration as done:
                    returned[place] = done.value
                else:
                    waiting.setdefault(type(plan), {})[place] = plan
            answers = {}
            for kind, plans in waiting.items():
                answers |= zip(plans, kind.carry_out(list(plans.values())), strict=True)
    finally:  # where one fails, the others leave what they are in
        for half in begun:
            if isinstance(half, Generator):
                half.close()
    return returned


Parcels = tuple[Parcel, ...]


class Transaction:
    """A call to a site, what came with it, and what becomes of the answer on its way through the layers.

    The site is opened after the checks that need none of it (`OpenedSite`). `undo` leaves it as it was, as if its
    process had died: no half-made state (or NaN in it) may reach the next round.
    """

    site: Site

    def __init__(self, call: Call, work: Callable[..., Any], declared: Operation, group: Sequence[str] = ()) -> None:
        """`group`: the sites that do the operation at once, this one among them."""
        self.call, self.work, self.declared, self.group = call, work, declared, group
        #: what came with the call, opened
        self.received: dict[str, Parcel] = {}
        #: a digest of the call and of the site's state before it, at a deployed site
        self.asked = ""
        #: indices of the site's images in every batch that it took, where a layer wants them
        self.used: list[Tensor] = []
        #: what the operation made, what of it is to leave, and what left: each is the one before, changed by layers
        self.made: Parcels = ()
        self.outgoing: Parcels = ()
        self.sent: Parcels = ()
        #: what layers hold until all is done
        self.held = contextlib.ExitStack()
        #: the site's state before anything changed in it, from when on a failure is undone
        self.before: SiteState | None = None

    def undo(self) -> None:
        """Put the site back to where it was."""
        if self.before is not None:
            self.site.state = self.before
            self.site.memory.clear()
            self.site.cache.clear()

    def refusal(self, error: BaseException) -> BaseException:
        """The error; where something is wrong with what another site sealed, it says so."""
        sealed = self.before is not None and any(parcel.kind == SEALED for parcel in self.call.parcels.values())
        if not sealed or not isinstance(error, ParcelRejected):
            return error
        return type(error)(f"{error}{AS_SENT}").with_traceback(error.__traceback__)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits of the site's images that the operation's release is computed from."""
        asked = signature_of(self.work).parameters.get("split")
        if asked is not None:
            return (str(self.call.arguments.get("split", asked.default)),)
        return self.declared.splits
