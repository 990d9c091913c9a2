"""The federation: what the coordinator half of a method sees, namely the sites and ways to ask them.

A method is a plain loop over `federation.rounds`; what it keeps from round to round lies in
`federation.state`, which is what a checkpoint saves and a resumed run gets back.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation import layers
from polyclinic.federation.call import AS_SENT, COORDINATOR, Call, Failure, Reply, sort_payload
from polyclinic.federation.checkpoint import Checkpoint, Manifest
from polyclinic.federation.collaborators import Engine, FederationSpec, Observer
from polyclinic.federation.layers.replies import Communication, Coverage, ReplyCheck
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.ledger.verify import Heads
from polyclinic.federation.site import SitePosition, SiteState, read_state
from polyclinic.federation.sums.coordinator_sums import Ask, CoordinatorSums
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES, added_up
from polyclinic.randomness import torch_rng

Weights = Mapping[str, Tensor]


class State(SimpleNamespace):
    """What a method keeps from round to round, as attributes: sets of tensors, or plain JSON values."""


class Federation:
    """The coordinator's view of a run. Build one per run; see `polyclinic.run`."""

    def __init__(self, spec: FederationSpec, engine: Engine, observer: Observer | None = None) -> None:
        self.engine = engine
        self.sites = spec.sites
        study, method = spec.study, spec.study.method
        self.seed = study.seed
        self.round = 0
        self.communication = Communication()
        self.coverage = Coverage()
        self.heads = Heads(spec.folder, spec.keys)
        self.failures: list[dict[str, Any]] = []
        self._initial = spec.initial
        self.trainer = spec.trainer
        self.backbones = dict(spec.backbones)
        self.generator, self.replay_settings = study.generator, study.replay
        self.observer = observer or Observer()
        self._folder = spec.folder
        self._checkpoint = Checkpoint(spec.folder / "checkpoint", durable=study.engine.durable)
        self.expected = spec.expected
        self.replies = ReplyCheck(method)
        self.keys = spec.keys
        self.sums = CoordinatorSums(study.federation, spec.run_name, method, added_up(study))
        #: whether sites' scores are added up, so that those of all together are all that is known
        self.adds_scores = ADD_SCORES in self.sums.covered
        self.image_shape = spec.image_shape
        self._settings, self._every = study.engine, study.engine.checkpoint_every
        self._fraction, self._patience = getattr(method, "fraction", 1.0), getattr(method, "patience", None)
        #: the sites that take part in this round; all of them before the first and after the last
        self.chosen = spec.sites
        self.weights_device = spec.device
        self._keyed: list[str] = []  # sites that know the others' public keys, and are known
        self._out: set[str] = set()  # sites that failed in this round
        self._asking = False
        self._state = State()
        self._once: dict[str, Weights] = {}
        self._reports: dict[str, Any] = {}
        self._resumed: Manifest | None = None

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, site: str, operation: str, *, to: str = COORDINATOR, **payload: Any) -> Reply | Failure:
        """Ask one site for an operation; a Failure (false) if it failed and the round may go on without it.

        A site that failed earlier in this round is not asked again. A keyword named like a kind of parcel
        (`weights=`, `synthetic_images=`) carries tensors by name; any other carries a plain JSON value.
        """
        if site in self._out:
            return Failure.before(site, operation)
        [answer] = self._answers([site], operation, payload, to)
        return answer

    def ask_all(
        self,
        operation: str,
        *,
        sites: Sequence[str] | None = None,
        counted: bool = True,
        by_site: Mapping[str, Mapping[str, Any]] | None = None,
        **payload: Any,
    ) -> list[Reply]:
        """Ask the sites of this round (or those named) at the same time; the replies of those that answered, in order.

        `by_site` has what only one site gets, by its name: `by_site={"north": {"gradients": ...}}`. `counted` is false
        only where a simulator hands sites what could not reach them in reality.
        """
        return list(self.ask_each(operation, sites=sites, counted=counted, by_site=by_site, **payload))

    def ask_each(
        self,
        operation: str,
        *,
        sites: Sequence[str] | None = None,
        counted: bool = True,
        by_site: Mapping[str, Mapping[str, Any]] | None = None,
        **payload: Any,
    ) -> Iterator[Reply]:
        """As `ask_all`, for replies that need not lie in memory all at once, such as the models of many sites.

        The sites work while their replies are taken, and only then; take them all before you ask again. WorkFailed
        comes after the last reply: before that, nobody knows how many sites are left. Where the study adds the answers
        up (`federation.sum`), one reply of all sites together comes.
        """
        asked = [site for site in (self.chosen if sites is None else sites) if site not in self._out]

        def ask(some: Sequence[str]) -> Iterator[Any]:
            return filter(None, self._answers(list(some), operation, payload, COORDINATOR, counted, by_site))

        return self._summed(operation, asked, payload, ask) if operation in self.sums.covered else ask(asked)

    def _summed(self, operation: str, asked: Sequence[str], payload: dict[str, Any], ask: Ask) -> Iterator[Reply]:
        """The one reply of all sites together, checked like that of one."""
        parcels, arguments = sort_payload(payload)
        for reply in self.sums.collect(self, operation, asked, parcels, arguments, ask):
            try:
                self.replies.check_sum(self, Call(reply.site, operation, self.round, parcels, arguments), reply)
            except (ParcelRejected, WorkFailed) as error:
                raise WorkFailed(f"the sum of '{operation}' in round {self.round} cannot be used: {error}") from None
            yield reply

    def ask_scores(self, weights: Weights | None, split: str, *, final: bool = False, **how: Any) -> list[Reply]:
        """Sums of the task's metrics over all sites' images of a split: of each site, or of all together where they
        are added up. `final`: the run is over."""
        operation = ADD_FINAL_SCORES if final else ADD_SCORES
        if not self.adds_scores:
            return self.ask_all("evaluate", sites=self.sites, weights=weights, split=split, **how)
        found, task = [], self.trainer.task
        for reply in self.ask_all(operation, sites=self.sites, weights=weights, split=split, **how):
            sums = task.opened(dict(reply.metrics))
            try:
                task.check_sums(sums, self.trainer.target)
            except ValueError as error:
                raise WorkFailed(f"the sum of '{operation}' in round {self.round} cannot be used: {error}") from None
            if int(sums.get("count", 1)):
                found.append(Reply(reply.site, (Parcel(SCORES, sums, reply.metadata),)))
        return found

    def forward(self, source: str, release: str, target: str, receive: str, **payload: Any) -> Reply | Failure:
        """Have `source` run `release` and hand what it releases to `receive` at `target`, unread in between.

        What leaves the source is sealed for the target: whoever carries it sees kind, size and the two names.
        """
        if target in self._out:  # nothing may leave the source for nobody
            return Failure.before(target, receive)
        if not {source, target} <= set(self._keyed):  # all sites tell their public keys before the first parcel
            keys = {reply.site: reply.keys[reply.site] for reply in self.ask_all("give_key")}
            self._keyed = [reply.site for reply in self.ask_all("take_keys", keys=keys)]
        if not {source, target} <= set(self._keyed):
            return Failure.before(target if source in self._keyed else source, release)
        reply = self.ask(source, release, to=target, **payload)
        if isinstance(reply, Failure):
            return reply
        carried: dict[str, Any] = {p.content.replace("-", "_"): p for p in reply.parcels}
        return self.ask(target, receive, **carried)

    def _answers(
        self,
        sites: list[str],
        operation: str,
        payload: dict[str, Any],
        to: str,
        counted: bool = True,
        by_site: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Reply | Failure]:
        parcels, arguments = sort_payload(payload, self._settings.wire)
        calls = []
        for site in sites:
            of_site, more = sort_payload((by_site or {}).get(site, {}), self._settings.wire)
            all_parcels, all_arguments = {**parcels, **of_site}, {**arguments, **more}
            anchor = self.heads.anchor(site)
            calls.append(Call(site, operation, self.round, all_parcels, all_arguments, to, anchor))
        self.communication.going(calls if counted else ())
        self.observer.asking(operation, sites)
        # sites may still be at work on one ask: another would reach them in an order that depends on the engine
        assert not self._asking, "take all replies of ask_each before you ask again"
        self._asking, failures = True, []
        try:
            for call, sent in zip(calls, self.engine.call(calls), strict=True):
                answer = self._checked(call, sent)
                if isinstance(answer, Failure):
                    failures.append(answer)
                yield answer
        finally:
            self._asking = False
        if failures:
            self.note_failures(failures)

    def _checked(self, call: Call, answer: Reply | Failure) -> Reply | Failure:
        if isinstance(answer, Failure):
            sealed = [parcel.metadata for parcel in call.parcels.values() if parcel.kind == SEALED]
            if not sealed or not answer.reason.endswith(AS_SENT):
                return answer
            # where a site cannot use what another one sealed for it, the failure is the sender's, unless it is the
            # receiver that has disagreed with more of the others
            if self.replies.disagree(sealed[0]["from"], call.site):
                return answer
            reason = f"site '{call.site}' refused it: {answer.reason}"
            return Failure(sealed[0]["from"], sealed[0]["operation"], reason)
        try:
            for layer in layers.COORDINATOR:
                layer(self, call, answer)
        except ParcelRejected as error:
            return Failure(call.site, call.operation, str(error))
        return answer

    def note_failures(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._out.add(failure.site)
            self.failures.append({"round": self.round, **vars(failure)})
            self.observer.failed(failure)
        # a share just above a whole number is rounding: 0.07 * 100 is 7.000000000000001
        needed = max(1, math.ceil(self._settings.quorum * len(self.chosen) - 1e-9))
        left = len(set(self.chosen) - self._out)
        if failures and (self._settings.on_failure == "stop" or left < needed):
            last = failures[-1]
            raise WorkFailed(
                f"site '{last.site}' failed in round {self.round} ({last.operation}): {last.reason}; "
                f"{left} of {len(self.chosen)} sites are left and {needed} are needed "
                f"(engine.on_failure = '{self._settings.on_failure}', engine.quorum = {self._settings.quorum})"
            )

    # --- rounds, state, resume --------------------------------------------------------------------

    def state(self, **initial: Any) -> State:
        """What the method keeps between rounds: `initial`, or what the checkpoint of a resumed run has."""
        values = dict(initial)
        if self._resumed and self._resumed.round > 0:
            values |= self._resumed.plain["state"]
            for name in self._resumed.files:
                if name.startswith("state."):
                    tensors = self._checkpoint.tensors(self._resumed, name)
                    if self.weights_device != "cpu":
                        tensors = {key: tensor.to(self.weights_device) for key, tensor in tensors.items()}
                    values[name.removeprefix("state.")] = tensors
        self._state = State(**values)
        return self._state

    def once(self, name: str, make: Callable[[], Weights]) -> Weights:
        """The tensors that `make` gives, made before the first round and kept for a resumed run."""
        file = f"once.{name}"
        if self._resumed and file in self._resumed.files:
            self._once[file] = self._checkpoint.tensors(self._resumed, file)
        else:
            assert self.round == 0, "what is made once is made before the first round"
            self._once[file] = make()
            self.save()
        return self._once[file]

    def rounds(self, count: int, state: State) -> Iterator[int]:
        """Rounds 1 to `count`, from where a resumed run stands; a checkpoint after each.

        Fewer where the method's patience is at an end. In each round `chosen` are the sites that take part.
        """
        assert state is self._state, "pass the state that federation.state() returned"
        for number in range(self.round + 1, count + 1):
            if self._patience is not None and self.observer.rounds_without_progress(self) >= self._patience:
                break
            self.round = number
            self._out = set()
            if self._fraction < 1.0:
                # a random share C of the sites (McMahan et al. 2017), at least one, in their order
                count = max(1, round(self._fraction * len(self.sites)))
                drawn = torch.randperm(len(self.sites), generator=self.rng("sites"))[:count]
                self.chosen = tuple(map(self.sites.__getitem__, sorted(drawn.tolist())))
            started = time.perf_counter()
            yield number
            self.observer.round_done(self, count, time.perf_counter() - started)
            if self._every and (number % self._every == 0 or number == count):
                self.save()
            elif not self._every and self.engine.simulation and not self._checkpoint.path.exists():
                self.engine.prune(self.engine.saved_positions())  # nobody can go back to older states
        # what follows the rounds concerns all sites again, in a resumed run as in any
        self._out, self.chosen = set(), self.sites

    def resume(self) -> bool:
        """Go back to the last checkpoint, if there is one; the sites too."""
        self._resumed = self._checkpoint.load(self._check_states if self.engine.simulation else None)
        manifest = self._resumed or Manifest()
        self.engine.restore(manifest.sites)
        if self._resumed is None:
            return False
        self.round = manifest.round
        self.communication = Communication(manifest.plain["communication"], manifest.plain["held"])
        self.coverage = Coverage(manifest.plain.get("coverage"))
        self.heads.restore(manifest.plain.get("ledgers", {}))
        self.failures = manifest.plain["failures"]
        self._out = {failure["site"] for failure in self.failures if failure["round"] == self.round}
        self.replies.said = dict(manifest.plain.get("said", {}))
        self._keyed = manifest.plain.get("keyed", [])
        self._reports = dict(manifest.plain.get("reports", {}))
        best = self._checkpoint.tensors(manifest, "best") if "best" in manifest.files else None
        self.observer.restore(manifest.plain["observer"], best)
        if self._checkpoint.problem:
            self.warn(f"{self._checkpoint.problem}; the run goes on from the checkpoint before, of round {self.round}")
        return True

    def _check_states(self, positions: Mapping[str, SitePosition]) -> None:
        """Damaged where what a simulated site keeps for itself is not what it wrote."""
        for site, position in positions.items():
            read_state(self._folder, site, position)

    def save(self) -> None:
        """Write a checkpoint of the coordinator and of every site."""
        tensors, plain = dict(self._once), {}
        for name, value in vars(self._state).items():
            if isinstance(value, Mapping) and isinstance(next(iter(value.values()), None), Tensor):
                tensors[f"state.{name}"] = value
            else:
                plain[name] = value
        if self.observer.best_weights is not None:
            tensors["best"] = self.observer.best_weights
        manifest = Manifest(round=self.round, sites=self.engine.checkpoint())
        manifest.plain = {
            "state": plain,
            "communication": self.communication.rows(),
            "coverage": self.coverage.plain(),
            "ledgers": self.heads.plain(),
            "failures": self.failures,
            "held": self.communication.held,
            "said": self.replies.said,
            "keyed": self._keyed,
            "observer": self.observer.memory(),
            "reports": self._reports,
        }
        before = self._checkpoint.save(manifest, tensors)
        self.engine.prune(before.sites)  # the states of two checkpoints stay

    # --- small things -----------------------------------------------------------------------------

    def rng(self, purpose: str) -> torch.Generator:
        """A generator of the coordinator's for this seed, purpose and round."""
        return torch_rng(self.seed, COORDINATOR, purpose, self.round)

    def evaluate(self, weights: Weights | None = None) -> None:
        """Score the model on the sites' validation images, when this round is an evaluation point."""
        self.observer.evaluate(self, weights)

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights that the study's network begins with; a method may change them."""
        return {name: tensor.to(self.weights_device, copy=True) for name, tensor in self._initial.items()}

    def alike(self, site: str, other: str) -> bool:
        """Whether two sites have the same network, so that one can take the other's weights."""
        return self.backbones.get(site) == self.backbones.get(other)

    def report(self, name: str, value: Any) -> None:
        """Put plain values a method found out into the result, under a name of their own."""
        self._reports[name] = value

    def warn(self, sentence: str) -> None:
        """Tell whoever watches the run, and the result (`warnings`), that something went otherwise than asked."""
        known = self._reports.setdefault("warnings", [])
        if sentence not in known:
            known.append(sentence)
            self.observer.warned(sentence)

    @property
    def reports(self) -> dict[str, Any]:
        return dict(self._reports)

    def handed_over(self, site: str, weights: Weights) -> None:
        """Note that `site` has finished its turn with `weights` (serial methods; `polyclinic forgetting`)."""
        self.observer.handed_over(self, site, weights)

    def simulated_state(self, site: str) -> SiteState:
        """What a simulated site keeps for itself, read from disk: the simulator may look, nobody else."""
        assert self.engine.simulation, "what stays at a real site nobody else sees"
        return read_state(self._folder, site, self.engine.checkpoint().get(site, SitePosition()))
