"""One file a method: a coordinator half that reads like the paper's algorithm, and a site half of operations.

Methods know federation, training, tasks and models; they know no engine, no study and not each other's settings,
except where one states its difference from another by inheriting from it.
"""

from polyclinic.methods.analytic import Analytic
from polyclinic.methods.centralized import Centralized
from polyclinic.methods.cwt import CyclicWeightTransfer
from polyclinic.methods.cwt_replay import CwtReplay
from polyclinic.methods.ditto import Ditto
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.fedavg_replay import FedAvgReplay
from polyclinic.methods.fedavg_share import FedAvgShare
from polyclinic.methods.fedavgm import FedAvgM
from polyclinic.methods.fedbn import FedBN
from polyclinic.methods.feddyn import FedDyn
from polyclinic.methods.feder import FedER, FedERA, FedERB
from polyclinic.methods.fedopt import FedOpt
from polyclinic.methods.fedper import FedPer
from polyclinic.methods.fedpft import FedPFT
from polyclinic.methods.fedprox import FedProx
from polyclinic.methods.fedrep import FedRep
from polyclinic.methods.fedreplay import FedReplay
from polyclinic.methods.fedsamples import FedSamples
from polyclinic.methods.fedsgd import FedSGD
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.finetune import FineTune
from polyclinic.methods.gaussian_heads import GaussianHeads
from polyclinic.methods.moon import Moon
from polyclinic.methods.private_head import PrivateHead
from polyclinic.methods.scaffold import Scaffold
from polyclinic.methods.shared.method import Method
from polyclinic.methods.splitnn import SplitNN
from polyclinic.methods.standalone import Standalone
from polyclinic.registry import Registry

_BASELINES = (Standalone, Centralized, FedSGD)
_AVERAGING = (FedAvg, FedProx, FedAvgM, FedBN, Scaffold, FedOpt, Moon, FedDyn, Ditto, FedRep, FedPer, FineTune)
_OTHERS = (PrivateHead, FedAvgShare, CyclicWeightTransfer, SplitNN)
_REPLAYING = (CwtReplay, FedAvgReplay, FedReplay, FedER, FedERA, FedERB, Felicia)
_OF_ONE_ROUND = (Analytic, GaussianHeads, FedPFT, FedSamples)
_BUILTIN: list[type[Method]] = [*_BASELINES, *_AVERAGING, *_OTHERS, *_REPLAYING, *_OF_ONE_ROUND]

#: by the name that each has in its settings
METHODS: Registry[type[Method]] = Registry(
    "polyclinic.methods", {kind.model_fields["name"].default: kind for kind in _BUILTIN}, base=Method
)

__all__ = ["METHODS", "Method"]
