"""The archive of released parcels that a site keeps for an audit, with the context that scoring an attack needs.

Of every operation that releases something of images, the first release, the last, and some at random are kept: in the
site's own folder, so they are no communication. Beside the parcels lie what the site had received (the weights it
started from), what it was asked and its state before that, so that the operation can be carried out again, and which
images it used, which only the scoring of an attack may look at. The choice depends on the seed
and the parcels' digests alone, so a run that was interrupted and resumed keeps the same ones.

    sites/<site>/kept/<round>-<step>-<operation>-<digest>/{<number>-<kind>.safetensors, context.safetensors, note.json}
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode
from polyclinic.files import atomic_folder, write_tensors
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.randomness import seed_of

if TYPE_CHECKING:
    from polyclinic.federation.call import Call
    from polyclinic.federation.site import Site

#: kinds of parcel that are made of images and can be attacked
ATTACKABLE_KINDS = ("weights", "gradients", "activations", "latents", "codes", "generator", "synthetic-images")
#: sums over images, which are attacked where they hold many numbers
SUM_KINDS = ("statistics", "metrics")
#: kinds that are kept where they leave together with one of these
COMPANION_KINDS = ("labels", "masks", "statistics")


def is_attackable(kind: str) -> bool:
    """Whether parcels of a kind are kept for an audit; of a plug-in's kind they are, since nobody knows better."""
    return kind in ATTACKABLE_KINDS or (kind in KINDS and kind not in KINDS.builtin)


def is_worth_keeping(parcel: Parcel) -> bool:
    """Whether a parcel is kept for an audit: of sums, only tables and long rows of counts; a few means tell nobody."""
    if parcel.kind not in SUM_KINDS:
        return is_attackable(parcel.kind)
    return any(t.dim() >= 2 or (t.dtype == torch.int64 and t.numel() > 1) for t in parcel.tensors.values())


class Asked(NamedTuple):
    """An operation that a site was asked for, with its plain arguments and the names of the parcels that came."""

    operation: str
    arguments: JsonObject
    received: list[str]


class Turn(NamedTuple):
    """What was asked of a site since it began to hold something in memory, and its state before that."""

    state: Mapping[str, Tensor]
    calls: list[Asked]


class ParcelArchive:
    """Watches the operations of the sites of one process. `random`: releases kept besides the first and the last."""

    def __init__(self, random: int, seed: int) -> None:
        self.random, self.seed = random, seed
        self._received: dict[str, dict[str, Parcel]] = {}
        self._turns: dict[str, Turn] = {}
        self._steps: dict[tuple[str, str], tuple[int, int]] = {}

    def begins(self, site: "Site", call: "Call", received: Mapping[str, Parcel]) -> None:
        """Tell before an operation what is asked of the site, and what it has received for it."""
        # copies: the work of a plug-in may change what came, and an audit would begin where that left off
        copies = {
            name: Parcel(one.kind, {key: t.clone() for key, t in one.tensors.items()}) for name, one in received.items()
        }
        self._received.setdefault(site.name, {}).update(copies)
        if not site.memory or site.name not in self._turns:
            self._turns[site.name] = Turn(dict(site.state), [])
        self._turns[site.name].calls.append(Asked(call.operation, dict(call.arguments), list(received)))

    def released(
        self,
        site: "Site",
        call: "Call",
        parcels: Sequence[Parcel],
        used: Sequence[Tensor],
        address: str,
        left: Sequence[Parcel] | None = None,
        asked: str = "",
    ) -> None:
        """Tell after the gate has let these parcels out. `used`: indices of the site's images in every batch that it
        took; `address`: what the operation's draws are addressed by; `left`: what they left as, in a sum of whole
        numbers; `asked`: the digest of the call that random shares are drawn by."""
        if any(is_worth_keeping(parcel) for parcel in parcels):
            step = self._step(call)
            wanted = [p for p in parcels if is_worth_keeping(p) or p.kind in COMPANION_KINDS]
            priority = seed_of(self.seed, site.name, "keep", address, call.round, step)
            name = f"{call.round:05d}-{step:05d}-{call.operation}-{wanted[0].digest[:12]}"
            note = {"operation": call.operation, "round": call.round, "step": step, "to": call.to, "priority": priority}
            note |= {"asked": asked} if asked else {}
            note |= {"left": [[parcel.kind, parcel.digest] for parcel in left]} if left else {}
            note |= {"split": call.arguments["split"]} if "split" in call.arguments else {}
            turn = self._turns.get(site.name, Turn({}, []))
            names = [name for asked in turn.calls for name in asked.received]
            if len(names) > len(set(names)):  # what came first under a name is not kept
                turn = Turn({}, [])
            note |= {"turn": turn.calls}
            context = {f"state/{key}": tensor for key, tensor in turn.state.items()}
            for argument, parcel in self._received.get(site.name, {}).items():
                context |= {f"received/{argument}/{key}": tensor for key, tensor in parcel.tensors.items()}
            counts = torch.tensor([len(index) for index in used], dtype=torch.int64)
            context |= {"used": torch.cat([*used, torch.zeros(0, dtype=torch.int64)]), "used_in_batch": counts}
            self._keep(site, name, note, wanted, context)
        if not site.memory:  # in the middle of a turn, what came at its beginning still counts
            self._received.pop(site.name, None)
            self._turns.pop(site.name, None)

    def _step(self, call: "Call") -> int:
        """How many releases of this operation the site had in this round before."""
        round, step = self._steps.get((call.site, call.operation), (call.round, 0))
        step = step if round == call.round else 0
        self._steps[call.site, call.operation] = (call.round, step + 1)
        return step

    def _keep(
        self, site: "Site", name: str, note: JsonObject, parcels: Sequence[Parcel], context: Mapping[str, Tensor]
    ) -> None:
        """Write a release if it is chosen, and delete those that it takes the place of."""
        folder = site.folder / "kept"
        kept = {old.name: old for old in releases(folder) if old.operation == note["operation"]}
        chosen = self._chosen([*((old.name, old.note) for old in kept.values() if old.name != name), (name, note)])
        if name in chosen and name not in kept:
            _write(folder / name, note, parcels, context)
        for old in kept.values():
            if old.name not in chosen:
                shutil.rmtree(old.folder, ignore_errors=True)

    def _chosen(self, found: list[tuple[str, JsonMapping]]) -> set[str]:
        """Of what is there, the first, the last, and of those in between the ones that a lot falls on."""
        in_order = sorted(found, key=lambda one: (one[1]["round"], one[1]["step"]))
        by_lot = sorted(in_order[1:-1], key=lambda one: one[1]["priority"])[: self.random]
        return {name for name, _ in (in_order[0], in_order[-1], *by_lot)}


@dataclass(frozen=True)
class Release:
    """What one operation of a site let out at one time, as it was kept."""

    folder: Path
    note: JsonMapping

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def operation(self) -> str:
        return str(self.note["operation"])

    @property
    def round(self) -> int:
        return int(self.note["round"])

    @property
    def step(self) -> int:
        """How many releases of the operation the site had in this round before."""
        return int(self.note["step"])

    @property
    def left(self) -> list[list[str]]:
        """Kind and digest of what the parcels left as, in a sum of whole numbers; empty where they left as they are."""
        return list(self.note.get("left", []))

    @property
    def split(self) -> str:
        """The site's images that were scored, where the operation was told; empty where it was not."""
        return str(self.note.get("split", ""))

    @property
    def files(self) -> list[Path]:
        """The parcels, in the order in which they left."""
        return sorted(self.folder.glob("[0-9]*-*.safetensors"))

    @property
    def kinds(self) -> list[str]:
        return [file.stem.split("-", 1)[1] for file in self.files]

    @cached_property
    def parcels(self) -> list[Parcel]:
        return [decode(file.read_bytes()) for file in self.files]

    @cached_property
    def digests(self) -> list[str]:
        """Those of the parcels as they lie there, to hold against a ledger; of bytes that are none, their SHA-256."""
        return [_digest_of(file.read_bytes()) for file in self.files]

    def parcel(self, kind: str) -> Parcel | None:
        return next((parcel for parcel in self.parcels if parcel.kind == kind), None)

    @cached_property
    def _context(self) -> dict[str, Tensor]:
        return load_file(self.folder / "context.safetensors")

    def received(self, name: str) -> dict[str, Tensor]:
        """Tensors that the site had received under this name of the operation (`weights`); empty if there were none."""
        return self._group(f"received/{name}/")

    def _group(self, start: str) -> dict[str, Tensor]:
        return {key.removeprefix(start): t for key, t in self._context.items() if key.startswith(start)}

    @property
    def state(self) -> dict[str, Tensor]:
        """The site's state before the first call of the turn."""
        return self._group("state/")

    @property
    def turn(self) -> list[Asked]:
        """What was asked of the site from the beginning of its turn to this release; empty where more came than was
        kept."""
        return [Asked(*one) for one in self.note.get("turn", [])]

    @property
    def used(self) -> list[Tensor]:
        """Indices of the site's training images by mini-batch, in order; empty if the operation took no batches."""
        return list(self._context["used"].split(self._context["used_in_batch"].tolist()))


def _digest_of(data: bytes) -> str:
    try:
        return decode(data).digest
    except ParcelRejected:
        return hashlib.sha256(data).hexdigest()


def releases(folder: Path) -> list[Release]:
    """All that a site has kept, in the order in which it left."""
    notes = sorted(folder.glob("[0-9]*/note.json"))  # not in a folder that was never finished
    return [Release(file.parent, parse_json(file.read_text(encoding="utf-8"))) for file in notes]


def _write(folder: Path, note: JsonMapping, parcels: Iterable[Parcel], context: Mapping[str, Tensor]) -> None:
    """Write a release atomically."""
    with atomic_folder(folder) as partial:
        for number, parcel in enumerate(parcels):
            (partial / f"{number}-{parcel.kind}.safetensors").write_bytes(parcel.encoded)
        write_tensors(partial / "context.safetensors", context)
        (partial / "note.json").write_text(json.dumps(note), encoding="utf-8")
