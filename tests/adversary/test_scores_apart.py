"""Attack: have a site of a secure study tell its own scores, by an operation that is not for it, or more often."""

import pytest
from attacked_site import KINDS, ask, first_weights

from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.kinds import ParcelRejected

THREE = {"partition": "column", "names": ["north", "south", "west"]}


@pytest.mark.parametrize(("how", "asked", "split", "words"), [
    ("secure", "evaluate", "test", "in this study scores are added up"),
    ("float", "add_scores", "validation", "in this study scores leave each site by themselves"),
    ("integer", "add_final_scores", "test", "in this study scores leave each site by themselves"),
    ("secure", "add_final_scores", "test", "the run is not over"),
    ("secure", "add_scores", "train", "scores of training images never leave"),
    ("secure", "add_scores", "validation", "no sum of 'add_scores' has begun"),
])  # fmt: skip
def test_scores_leave_in_the_way_of_the_study_only(kit, how, asked, split, words):
    kit.policy(kinds=[*KINDS, "masked", "shares"])
    host = kit.host(federation={"sum": how}, sites=THREE)
    with pytest.raises((GateRefused, ParcelRejected), match=words):
        ask(host, asked, 1, weights=first_weights(host), split=split)


@pytest.mark.parametrize("sum_of", ["evaluate", "keep_model", "", ["train"], None])
def test_no_sum_begins_of_what_the_study_does_not_add_up(kit, sum_of):
    host = kit.host(federation={"sum": "secure"}, sites=THREE)
    with pytest.raises(ParcelRejected, match="is none of this study"):
        ask(host, "give_mask_key", 1, sum_of=sum_of)
