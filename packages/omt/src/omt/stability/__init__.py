"""How far a plan can be trusted: certificates of stability, derivatives, and the bootstrap."""

from omt.stability.bootstrap import Bootstrap, Summary, bootstrap
from omt.stability.certificate import (
    StabilityCertificate,
    cost_perturbation_bound,
    movement_bound,
    stability_certificate,
)
from omt.stability.sensitivity import Sensitivity, sensitivity

__all__ = [
    "Bootstrap",
    "Sensitivity",
    "StabilityCertificate",
    "Summary",
    "bootstrap",
    "cost_perturbation_bound",
    "movement_bound",
    "sensitivity",
    "stability_certificate",
]
