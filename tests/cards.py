"""Cards of networks that no run has made."""

import json
from typing import Any

from xncaps.data import Facts
from xncaps.deploy.card import Card


def facts_for(network: Any, classes: tuple[str, ...] | None = None) -> Facts:
    """Facts of data that the network could have been trained on."""
    channels, side = network.in_channels, network.image_size
    names = classes or tuple(map(str, range(network.num_classes)))
    return Facts(
        name="sample",
        classes=names,
        shape=(channels, side, side),
        pairs=False,
        mean=(0.1307, 0.2, 0.3)[:channels],
        std=(0.3081, 0.25, 0.2)[:channels],
        ground="dark",
        counts=(3600, 400, 1000),
        fingerprint={},
    )


def card_for(
    network: Any,
    name: str,
    head: str | None = None,
    attach: str = "replace",
    options: dict[str, Any] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Card:
    """The card of a network that ``create_model`` made with these arguments."""
    return Card(
        network={
            "backbone": name,
            "head": head,
            "num_classes": network.num_classes,
            "in_channels": network.in_channels,
            "image_size": network.image_size,
            "attach": attach,
            "options": json.loads(json.dumps(options or {})),
        },
        facts=facts_for(network, classes),
        scores=network.scores,
        loss="margin",
        data={"name": "sample"},
    )
