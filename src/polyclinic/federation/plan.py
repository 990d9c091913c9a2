"""Plans: the work that a site half asks for, carried out alone or with the plans of other simulated sites.

An operation that trains is a generator function, a *site half*. It yields a plan, gets back what came of it, and
returns its parcels:

    fitted = yield Fit(site, start, spec)
    return release(site, fitted)

It says once what one site does. Whoever carries out the plans may stack those of several sites.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from polyclinic.federation.site import Site

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike

Parcels = TypeVar("Parcels")
#: a site half that yields plans and returns parcels
Work = Generator[Any, Any, Parcels]


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


def carry_out(halves: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
    """What each site half returns. Those that wait at plans of one kind have them carried out together."""
    returned: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(halves)))
    try:
        while answers:
            plans: dict[int, Any] = {}
            for place, answer in answers.items():
                try:
                    plans[place] = halves[place].send(answer)
                except StopIteration as done:
                    returned[place] = done.value
            answers = {}
            for kind in dict.fromkeys(type(plan) for plan in plans.values()):
                alike = {place: plan for place, plan in plans.items() if type(plan) is kind}
                answers |= zip(alike, kind.carry_out(list(alike.values())), strict=True)
    finally:  # where one fails, the others leave what they are in
        for half in halves:
            half.close()
    return [returned[place] for place in range(len(halves))]


def work_at(sites: Sequence[Site], work: Callable[..., Any], payloads: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What an operation returns at each of some sites, whether it yields plans or not."""
    made = [work(site, **payload) for site, payload in zip(sites, payloads, strict=True)]
    yielding = [place for place, one in enumerate(made) if isinstance(one, Generator)]
    returned = carry_out([made[place] for place in yielding])
    for place, value in zip(yielding, returned, strict=True):
        made[place] = value
    return made
