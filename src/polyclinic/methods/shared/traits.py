"""Traits: what a method can do and what it needs, for the checks of a study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The defaults hold for a method whose sites train with `local_training.train`; a method states what differs.

    A subclass starts from its parent's: `traits = replace(FedAvg.traits, serial=True)`.
    """

    #: tasks the method can do
    tasks: tuple[str, ...] = ("classification", "regression", "segmentation")
    #: sites take turns, so that `polyclinic forgetting` has hand-overs to show
    serial: bool = False
    #: batch-norm layers are averaged or stay at the sites as `model.batch_norm` says, or always the one or the other
    batch_norm: Literal["as the study says", "average", "local"] = "as the study says"
    #: what can be trained with differential privacy (`privacy.on`), besides a generator that sites replay: classifier
    #: (the network of any task), encoder, primary (by the coordinator), generator. A site does not release weights or
    #: gradients that were trained without, where the study wants them private (`federation/layers/privacy.py`)
    private_networks: tuple[str, ...] = ("classifier",)
    #: its sites train on `replayed=self.replayed(site)`, so that a table [replay] can join replayed images
    takes_replay: bool = False
    #: sites may have different networks (`model.backbones`)
    mixes_backbones: bool = False
    #: trains its generator in the phases of [tuning], where it trains one
    tunes_generator: bool = True
    #: its coordinator and its sites take weights wherever they lie, so that those of sites that are simulated on a GPU
    #: can stay there. Not one that mixes weights with tensors of a site's state, which may lie on the CPU
    weights_stay: bool = False
    #: cuts the network, and so needs `model.cut`
    needs_cut: bool = False
    #: its sites can mix two training images (`optimizer.augment`, mixup)
    takes_mixup: bool = True
    #: a share of the sites can take part in a round (`method.fraction`)
    samples_sites: bool = True
    #: sites train on nothing but their own images, so that what frozen layers give can take the images' place
    takes_frozen_features: bool = False
    #: fits a head on features of an encoder, and so needs one as `model.backbone`
    needs_encoder: bool = False
    #: its weights come nearer step by step, by training at the sites, and are not solved for or averaged at the end, so
    #: that the incoming check can compare them with those before
    has_course: bool = True
    #: its coordinator needs the mean or the sum of the sites' answers only, so that it can be secret
    #: (`federation.sum = "secure"`)
    sums: bool = False
    #: a site that knows only some classes (`federation.label_sets`) does not make the common model unlearn others
    label_sets: bool = False
    #: is for studies with a table [privacy] only
    needs_privacy: bool = False
