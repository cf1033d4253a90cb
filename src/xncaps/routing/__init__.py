"""Routing: how predictions become output capsules; ``ROUTINGS`` and ``AGREEMENTS`` name them."""

from xncaps.routing.agreement import AGREEMENTS, DotAgreement, XnorAgreement
from xncaps.routing.dynamic import DynamicRouting

ROUTINGS: dict[str, type[DynamicRouting]] = {"dynamic": DynamicRouting}

__all__ = ["AGREEMENTS", "ROUTINGS", "DotAgreement", "DynamicRouting", "XnorAgreement"]
