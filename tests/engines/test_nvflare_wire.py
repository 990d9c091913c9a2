"""Both ends of the wire without NVFlare between them: large calls, lost messages, dead workers, sites come back."""

import threading
import time

import pytest
import torch
from processes import wait_for

from polyclinic.engines.nvflare import engine as coordinators_end
from polyclinic.engines.nvflare import relay as sites_end
from polyclinic.engines.nvflare.engine import JOB_ENDED, STOPPED_AT_SITE, JobEnded, NVFlare, Patience, pieces
from polyclinic.engines.nvflare.relay import Relay
from polyclinic.engines.worker_process import WorkerGone
from polyclinic.federation.call import Call, Failure, Reply, pack, unpack
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import SitePosition

#: for sites that are lost for good: that shows however slow the machine is
LOST_SOON = Patience(None, 0.5)


class Worker:
    """A site's child process: sends back what it was sent, and counts up its position."""

    def __init__(self, behave=lambda call: None):
        self.behave = behave
        self.restored = None
        self.position = SitePosition()
        self.durable = []
        self.killed = threading.Event()

    def restore(self, positions):
        self.position = self.restored = next(iter(positions.values()))

    def exchange_call(self, data, deadline, durable=None):
        call = Call.from_bytes(data)
        self.behave(call)
        if self.killed.is_set():
            raise WorkerGone("the site's process died (exit code -9)")
        if durable:
            self.durable.append(durable)
        self.position = SitePosition(self.position.version + 1, self.position.lines + 1)
        reply = Reply(call.site, tuple(call.parcels.values()))
        return {"failed": None, "position": list(self.position)}, reply.to_bytes()

    def kill(self):
        self.killed.set()


class Federation:
    """Sites, each with its relay, and the engine; `wire` may lose messages."""

    def __init__(self, *sites, behave=lambda call: None, patience=None, wire=None):
        self.workers = {site: [] for site in sites}
        self.relays = {site: Relay(site, lambda site=site: self._start(site, behave)) for site in sites}
        self.sent = []
        self.wire = wire or (lambda site, what: None)
        self.durable = 0
        sends = {site: self._sender(site) for site in sites}
        self.engine = NVFlare(sends, patience=patience or Patience(None, 3600.0), simulation=True, durable=self._count)

    def _count(self):
        self.durable += 1

    def _start(self, site, behave):
        self.workers[site].append(Worker(behave))
        return self.workers[site][-1]

    def _sender(self, site):
        def send(what, payload, timeout):
            self.sent.append((site, what, len(payload)))
            self.wire(site, what)
            answer = self.relays[site].handle(what, payload)
            self.wire(site, f"answer to {what}")
            return answer

        return send

    def ask(self, *sites, parcels=None, round=1):
        return list(self.engine.call([Call(site, "train", round, parcels or {}) for site in sites]))

    def messages(self, site):
        return [what for of, what, _ in self.sent if of == site]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Small pieces, and no waiting."""
    for end in (coordinators_end, sites_end):
        monkeypatch.setattr(end, "PIECE", 1000)
        monkeypatch.setattr(end, "PATIENCE", 0.1)
    monkeypatch.setattr(coordinators_end, "pieces", lambda parts: pieces(parts, 1000))
    monkeypatch.setattr(coordinators_end, "PAUSE", 0.01)
    monkeypatch.setattr(coordinators_end, "SHORT", 0.1)


def weights(size):
    return {"weights": Parcel("weights", {"w": torch.arange(size, dtype=torch.float32)})}


@pytest.mark.parametrize("size", [1, 100, 250, 5000])
def test_what_is_sent_arrives_however_large(size):
    federation = Federation("a", "b")
    answers = federation.ask("a", "b", parcels=weights(size))
    assert [answer.site for answer in answers] == ["a", "b"]
    for answer in answers:
        assert torch.equal(answer.weights["w"], torch.arange(size, dtype=torch.float32))
    assert max(length for _, _, length in federation.sent) < 2000
    large = size >= 250  # its header included
    assert ("piece" in federation.messages("a"), "take" in federation.messages("a")) == (large, large)


def test_answers_are_fetched_one_by_one_as_they_are_taken():
    """Four models of 200 MB need not lie in the coordinator's memory together."""
    federation = Federation("a", "b", "c")
    answers = federation.engine.call([Call(site, "train", 1, weights(5000)) for site in "abc"])
    next(answers)
    time.sleep(0.2)
    assert "take" in federation.messages("a")
    assert "take" not in federation.messages("b") + federation.messages("c")
    assert len(list(answers)) == 2


def test_long_work_is_waited_for_in_short_messages():
    federation = Federation("a", behave=lambda call: wait_for(lambda: federation.messages("a").count("wait") >= 3))
    assert federation.ask("a")


@pytest.mark.parametrize("lost", ["run", "answer to run", "piece", "answer to piece", "take", "answer to take", "wait"])
def test_a_lost_message_is_sent_again_and_nothing_is_done_twice(lost):
    """The site works until it has been asked twice how far it is, so that there is a message to lose."""
    losses = {lost: 2}

    def wire(site, what):
        if losses.get(what, 0):
            losses[what] -= 1
            raise TimeoutError("lost on the way")

    enough = 3 if lost == "wait" else 1
    work = lambda call: wait_for(lambda: federation.messages("a").count("wait") >= enough)  # noqa: E731
    federation = Federation("a", behave=work, wire=wire)
    [answer] = federation.ask("a", parcels=weights(1000))
    assert torch.equal(answer.weights["w"], torch.arange(1000, dtype=torch.float32))
    assert losses == {lost: 0}
    assert federation.engine.checkpoint() == {"a": SitePosition(1, 1)}


def test_a_dead_worker_is_a_failure_and_the_next_call_starts_another_from_where_the_site_stood():
    def die_in_the_second_call(call):
        if call.round == 2 and len(federation.workers["a"]) == 1:
            federation.workers["a"][0].kill()

    federation = Federation("a", behave=die_in_the_second_call)
    first, second, third = (federation.ask("a", round=r)[0] for r in (1, 2, 2))
    assert first
    assert isinstance(second, Failure)
    assert second.reason == "the site's process died (exit code -9)"
    assert third
    assert [worker.restored for worker in federation.workers["a"]] == [SitePosition(0, 0), SitePosition(1, 1)]


def test_a_site_whose_answer_was_lost_goes_back_to_where_the_coordinator_saw_it():
    cut = {"off": False}

    def wire(site, what):
        if cut["off"]:
            raise TimeoutError("lost on the way")
        cut["off"] = what == "run" and federation.engine.checkpoint() != {}

    federation = Federation("a", wire=wire, patience=LOST_SOON)
    assert federation.ask("a")
    [failure] = federation.ask("a")
    assert "no sign of life" in failure.reason
    assert "engine.silence = 0.5" in failure.reason
    assert federation.engine.lost == {"a"}
    [again] = federation.ask("a")
    assert isinstance(again, Failure)  # still lost, and found out by a short ping
    assert federation.messages("a")[-1] == "ping"
    cut["off"] = None
    federation.wire = lambda site, what: None
    assert federation.ask("a")
    assert federation.engine.lost == set()
    assert federation.workers["a"][-1].restored == SitePosition(1, 1)
    assert federation.engine.checkpoint() == {"a": SitePosition(2, 2)}


def test_the_deadline_is_named_and_work_that_was_given_up_is_ended():
    federation = Federation("a", behave=lambda call: federation.workers["a"][-1].killed.wait(), patience=Patience(0.3))
    [failure] = federation.ask("a")
    assert failure.reason == "no answer within the deadline (engine.deadline)"
    federation.workers["a"][0].behave = lambda call: None
    federation.ask("a")
    assert federation.workers["a"][0].killed.is_set()


def test_a_site_that_is_stopped_is_lost_at_once():
    """It answers whoever waits, and says at the coordinator that it leaves; nobody waits for `engine.silence`."""
    ends = threading.Event()
    federation = Federation("a", "b", behave=lambda call: call.site == "a" and ends.wait(60))
    answers = federation.engine.call([Call(site, "train", 1, {}) for site in "ab"])
    begun = threading.Thread(target=lambda: answered.extend(answers))
    answered = []
    begun.start()
    wait_for(lambda: "wait" in federation.messages("a"))
    federation.relays["a"].leave()
    federation.engine.leaves("a")
    begun.join()
    left, stayed = answered
    assert (left.reason, bool(stayed)) == (STOPPED_AT_SITE, True)
    assert federation.workers["a"][0].killed.is_set()
    assert federation.engine.lost == {"a"}
    [again] = federation.ask("a")  # its process is there for another moment
    assert (again.reason, federation.engine.lost) == (STOPPED_AT_SITE, {"a"})
    ends.set()


def test_a_job_that_nvflare_ended_is_no_failure_of_a_site():
    """It ends a job at all sites where the process of one was killed: the run goes on in another job."""
    pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
    from nvflare.collab.api.exceptions import RunAborted

    from polyclinic.deployment.programs import sender

    ends = threading.Event()
    federation = Federation("a", "b", behave=lambda call: ends.wait(60))
    answers = federation.engine.call([Call(site, "train", 1, {}) for site in "ab"])
    threading.Timer(0.3, lambda: federation.relays["b"].leave(JOB_ENDED)).start()
    threading.Timer(0.5, lambda: federation.relays["a"].leave(JOB_ENDED)).start()
    with pytest.raises(JobEnded, match="ended the job"):
        list(answers)
    assert federation.engine.lost == set()
    ends.set()

    class Proxy:
        def __call__(self, timeout):
            return self

        def call(self, what, payload):
            raise RunAborted("run is aborted while waiting for remote responses")

    federation.engine._sites["a"] = sender(Proxy())
    with pytest.raises(JobEnded):
        federation.ask("a")


def test_failing_and_absent_sites_are_failures_at_once():
    engine = NVFlare({"a": None}, patience=Patience(), simulation=False, durable=lambda: None)
    [failure] = engine.call([Call("a", "train", 1)])
    assert failure.reason == "is not connected"
    assert engine.lost == {"a"}

    def wire(site, what):
        raise RuntimeError("the site has no idea")

    [failure] = Federation("a", wire=wire).ask("a")
    assert failure.reason == "RuntimeError: the site has no idea"

    def wire(site, what):
        if site == "b":
            raise TimeoutError("lost on the way")

    answers = Federation("a", "b", "c", wire=wire, patience=LOST_SOON).ask("a", "b", "c")
    assert [bool(answer) for answer in answers] == [True, False, True]


def test_sites_hear_with_the_next_call_what_is_durable():
    federation = Federation("a")
    federation.ask("a")
    federation.engine.prune(federation.engine.checkpoint())
    assert federation.durable == 1
    federation.ask("a")
    federation.ask("a")
    assert federation.workers["a"][0].durable == [{"a": [1, 1]}]


@pytest.mark.timeout(60)
def test_an_error_where_answers_are_taken_does_not_wait_for_a_site_that_works_on():
    """Without a deadline a site may be at work for days, and says so whenever it is asked."""
    at_work, over, before = threading.Event(), threading.Event(), threading.active_count()

    def behave(call):
        if call.site == "b":
            at_work.set()
            over.wait()

    federation = Federation("a", "b", behave=behave)

    def take_answers():
        for _ in federation.engine.call([Call(site, "train", 1) for site in "ab"]):
            at_work.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_answers()
    asked = len(federation.messages("b"))
    over.set()
    wait_for(lambda: threading.active_count() <= before)
    assert len(federation.messages("b")) <= asked + 1  # nobody asks any more whether it is done


@pytest.mark.timeout(60)
def test_a_call_that_was_given_up_while_its_worker_started_is_not_waited_for():
    """The worker did not exist yet when it was to be killed: it must not work on the old call for days then."""
    starting, go = threading.Event(), threading.Event()
    workers = []

    def start():
        first = not workers
        workers.append(Worker(lambda call: workers[0].killed.wait() if first else None))
        starting.set()
        assert go.wait(30)
        return workers[-1]

    relay = Relay("a", start)
    header = {"pieces": 0, "position": SitePosition(), "durable": None, "deadline": None}

    def run(name):
        return unpack(relay.handle("run", pack({"call": name, **header}, [Call("a", "train", 1).to_bytes()])))[0]

    first = threading.Thread(target=run, args=["first"], daemon=True)
    first.start()
    assert starting.wait(30)
    threading.Timer(0.2, go.set).start()  # meanwhile the relay has been told to work on the second
    run("second")
    while (said := unpack(relay.handle("wait", pack({"call": "second"}, [])))[0])["state"] == "working":
        pass
    assert (said["failed"], said["position"]) == (None, [1, 1])
    assert [worker.killed.is_set() for worker in workers] == [True, False]
    first.join(30)
    assert not first.is_alive()


def answer_with(federation, site, change):
    """From now on the site's answers are what `change(what, header, blobs)` makes of them."""
    honest = federation.relays[site].handle

    def handle(what, payload):
        return pack(*change(what, *unpack(honest(what, payload))))

    federation.relays[site].handle = handle


@pytest.mark.parametrize("size", [0, -1, 2**60, "many", None, True])
def test_an_announced_size_is_bounded(size):
    federation = Federation("a", "b")
    answer_with(federation, "a", lambda what, header, blobs: ({**header, "size": size}, blobs))
    liar, honest = federation.ask("a", "b", parcels=weights(400))
    assert isinstance(liar, Failure)
    assert "announced an answer of" in liar.reason
    assert honest


def test_a_piece_is_bounded_by_what_was_announced_and_work_without_a_deadline_too(monkeypatch):
    federation = Federation("a")
    grown = lambda what, header, blobs: (header, [blobs[0] * 50] if what == "take" else blobs)  # noqa: E731
    answer_with(federation, "a", grown)
    [liar] = federation.ask("a", parcels=weights(400))
    assert "sent a piece of 50000 bytes where at most 1000 were left" in liar.reason
    monkeypatch.setattr(coordinators_end, "LONGEST_WORK", 0.0)
    federation = Federation("a")
    answer_with(federation, "a", lambda what, header, blobs: ({"state": "working"}, []))
    [lost] = federation.ask("a")
    assert "no answer within the deadline (engine.deadline)" in lost.reason


def test_a_site_keeps_no_more_of_a_call_than_any_call_has(monkeypatch):
    monkeypatch.setattr(sites_end, "LARGEST", 2500)
    relay = Federation("a").relays["a"]
    for index in range(2):
        relay.handle("piece", pack({"call": "c", "index": index}, [bytes(1000)]))
    with pytest.raises(ValueError, match="a piece of 1000 bytes after 2000: a call has at most 2500 bytes"):
        relay.handle("piece", pack({"call": "c", "index": 2}, [bytes(1000)]))
    with pytest.raises(ValueError, match="a piece of 1001 bytes"):
        relay.handle("piece", pack({"call": "d", "index": 0}, [bytes(1001)]))


def test_weights_travel_once_until_others_replace_them_or_the_site_starts_again():
    federation = Federation("a", "b")
    same = weights(5000)
    for number in range(3):
        federation.sent.clear()
        for answer in federation.ask("a", "b", parcels=same, round=number):
            assert torch.equal(answer.weights["w"], torch.arange(5000.0))
        came = sum(length for site, what, length in federation.sent if site == "a" and what in ("piece", "run"))
        assert (came > 20_000) is (number == 0)
    federation = Federation("a")
    other = {"weights": Parcel("weights", {"w": torch.ones(5000)})}
    for parcels in (weights(5000), other, weights(5000), other, other):
        [answer] = federation.ask("a", parcels=parcels)
        assert torch.equal(answer.weights["w"], parcels["weights"].tensors["w"])
    assert federation.messages("a").count("run") == 5
    # a site that was started again asks for what it has no more
    federation = Federation("a")
    federation.ask("a", parcels=weights(5000))
    federation.relays["a"] = Relay("a", lambda: federation._start("a", lambda call: None))
    federation.sent.clear()
    [answer] = federation.ask("a", parcels=weights(5000))
    assert torch.equal(answer.weights["w"], torch.arange(5000.0))
    assert federation.messages("a").count("run") == 2  # without them, then with them
