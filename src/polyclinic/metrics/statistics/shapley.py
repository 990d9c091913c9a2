"""Shapley values: what each player adds to a game, on average over all orders in which the players may come."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

#: the value of a coalition of players
Game = Callable[[frozenset[str]], float]
#: players up to which all coalitions are looked at
EXACT = 10


class Share(NamedTuple):
    """The value that a player adds, with an interval (95 %, normal) where orders were sampled; else both ends are the
    value."""

    value: float
    low: float
    high: float


def exact_shares(players: Sequence[str], game: Game) -> dict[str, Share]:
    """The mean over all orders, from the values of all 2^n coalitions."""
    count = len(players)
    groups = [frozenset(some) for size in range(count + 1) for some in combinations(players, size)]
    values = {group: game(group) for group in groups}
    found = {}
    for player in players:
        total = 0.0
        for coalition, value in values.items():
            if player not in coalition:
                weight = math.factorial(len(coalition)) * math.factorial(count - len(coalition) - 1)
                total += weight * (values[coalition | {player}] - value)
        share = total / math.factorial(count)
        found[player] = Share(share, share, share)
    return found


def sampled_shares(players: Sequence[str], game: Game, orders: int, rng: np.random.Generator) -> dict[str, Share]:
    """The mean over some random orders, with an interval; at most orders · n + 1 coalitions are looked at."""
    kept: dict[frozenset[str], float] = {}

    def value(coalition: frozenset[str]) -> float:
        if coalition not in kept:
            kept[coalition] = game(coalition)
        return kept[coalition]

    added: dict[str, list[float]] = {player: [] for player in players}
    for _ in range(orders):
        before: frozenset[str] = frozenset()
        for place in rng.permutation(len(players)):
            after = before | {players[place]}
            added[players[place]].append(value(after) - value(before))
            before = after
    found = {}
    for player, some in added.items():
        mean = float(np.mean(some))
        half = 1.96 * float(np.std(some, ddof=1)) / math.sqrt(orders) if orders > 1 else math.inf
        found[player] = Share(mean, mean - half, mean + half)
    return found


def leave_one_out(players: Sequence[str], game: Game) -> dict[str, float]:
    """The loss of value without each player."""
    everybody = frozenset(players)
    whole = game(everybody)
    return {player: whole - game(everybody - {player}) for player in players}
