"""Freezing, on our own networks."""

from torch import nn

import xncaps


def test_norms_are_frozen_at_once():
    """Not only from the next ``model.train()`` on."""
    model = xncaps.create_model("convnet", "xnidr").train()
    norms = [module for module in model.backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) > 1
    assert all(norm.training for norm in norms)
    xncaps.freeze_backbone(model)
    assert not any(norm.training for norm in norms)
    assert model.head.training
    xncaps.unfreeze_backbone(model)
    assert all(norm.training for norm in norms)
