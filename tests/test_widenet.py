"""What is particular to widenet, and to networks that look at mirror images as well."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checks import refused
from runs import command, run, small
from xncaps import create_model, pack
from xncaps.backbones import WideNet
from xncaps.counting import summary
from xncaps.data import load_data
from xncaps.errors import InputTypeError
from xncaps.networks import Classifier


def patches_of(images: Tensor) -> np.ndarray:
    """Every 2x2 patch as a row, the long way."""
    batch, channels, height, width = images.shape
    pixels = images.double().numpy()
    rows = [
        pixels[n, :, y : y + 2, x : x + 2].reshape(-1)
        for n in range(batch)
        for y in range(height - 1)
        for x in range(width - 1)
    ]
    assert rows[0].shape == (channels * 4,)
    return np.array(rows)


@pytest.mark.parametrize(("channels", "count"), [(1, 3), (3, 7), (2, 101)])
def test_the_first_layer_whitens_the_patches_it_has_seen(channels: int, count: int) -> None:
    torch.manual_seed(0)
    mix = torch.randn(channels, channels)
    images = torch.einsum("ck,nkyx->ncyx", mix, torch.randn(count, channels, 9, 11)) + 0.5
    images = images + images.roll(1, dims=3)  # neighbours are alike
    network = WideNet(channels, 9, width=0.125)
    network.prepare(images)
    filters = network.stem.weight.detach().double().flatten(1).numpy()
    half = 4 * channels
    assert filters.shape == (2 * half, half)
    assert np.array_equal(filters[half:], -filters[:half])
    seen = patches_of(images) @ filters[:half].T
    covariance = np.cov(seen.T, bias=True)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 1e-4
    # Each a little below 1: small variances count as somewhat larger.
    variances = np.linalg.eigvalsh(np.cov(patches_of(images).T, bias=True))
    wanted = variances / (variances + 5e-4 * variances.mean())
    assert np.abs(np.sort(np.diag(covariance)) - np.sort(wanted)).max() < 1e-4
    assert not network.stem.weight.requires_grad
    assert network.stem.bias is not None
    assert network.stem.bias.requires_grad


def test_images_of_one_colour_do_no_harm() -> None:
    network = WideNet(1, 28, width=0.125)
    network.prepare(torch.full((5, 1, 28, 28), 0.25))
    assert network.stem.weight.isfinite().all()
    assert network(torch.randn(2, 1, 28, 28)).isfinite().all()


def test_convolutions_begin_by_handing_their_input_on() -> None:
    network = WideNet(3, 32, width=0.25)
    layers = [part for part in network.modules() if isinstance(part, nn.Conv2d)][1:]
    assert len(layers) == 6
    for layer in layers:
        maps = torch.randn(2, layer.in_channels, 5, 5)
        kept = min(layer.in_channels, layer.out_channels)
        assert torch.equal(layer(maps)[:, :kept], maps[:, :kept])


@pytest.mark.parametrize("side", [9, 16, 28, 33, 36])
def test_the_largest_value_of_each_map_counts(side: int) -> None:
    network = WideNet(1, side, width=0.125)
    images = torch.randn(2, 1, side, side + 8)
    maps = network.top[:-1](network.trunk(images))
    assert maps.shape == (2, 32, (side - 1) // 8, (side + 7) // 8)
    highest = maps.detach().flatten(2).numpy().max(axis=2)
    assert np.array_equal(network(images).detach().numpy(), highest.reshape(2, 32, 1, 1))


def test_training_begins_with_patches_of_the_training_images(tmp_path: Path) -> None:
    config = small(model="widenet", attach="features", options={"width": 0.125, "caps_in": 8})
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    kept = load_file(tmp_path / "run" / "model.safetensors")["backbone.trunk.0.weight"]
    seen = patches_of(load_data("sample", train_count=300).train.images[:20].float())
    spread = np.cov((seen @ kept.double().flatten(1).numpy()[:4].T).T, bias=True)
    # Of other images of the same kind, and by a factor: training normalises its images.
    assert np.abs(spread / np.diag(spread).mean() - np.eye(4)).max() < 0.35


@pytest.mark.parametrize("head", ["linear", "dr", "xnodr"])
def test_a_mirror_image_has_the_same_scores(head: str) -> None:
    torch.manual_seed(1)
    plain = create_model("convnet", head, attach="features", width=0.25).eval()
    both = create_model("convnet", head, attach="features", width=0.25, mirror=True).eval()
    both.load_state_dict(plain.state_dict())
    images = torch.randn(5, 1, 28, 28)
    with torch.no_grad():
        wanted = (plain(images) + plain(images.flip(3))) / 2
        assert not torch.allclose(wanted, plain(images))
        torch.testing.assert_close(both(images), wanted)
        torch.testing.assert_close(both(images.flip(3)), wanted)
        torch.testing.assert_close(pack(both)(images), wanted, rtol=1e-5, atol=1e-5)
        plain.train()
        both.train()
        assert torch.equal(both(images), plain(images))
        assert both.eval()(images[:0]).shape == (0, 10)
    macs = [summary(network, (1, 28, 28)).macs for network in (plain.eval(), both.eval())]
    assert macs[1] == 2 * macs[0]


def test_couplings_of_an_image_and_its_mirror_image() -> None:
    network = create_model("convnet", "dr", attach="features", width=0.25, mirror=True).eval()
    images = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        scores, couplings = network(images, return_couplings=True)
        torch.testing.assert_close(scores, network(images))
    assert couplings.shape == (3, 32, 10)
    torch.testing.assert_close(couplings.sum(dim=2), torch.ones(3, 32))


def test_mirror_is_yes_or_no() -> None:
    text = refused(InputTypeError, create_model, "convnet", mirror="yes")
    assert text == "create_model: mirror must be true or false; got 'yes'."
    network = create_model("convnet", "fc", mirror=False)
    assert type(network) is Classifier
    assert not network.mirror
