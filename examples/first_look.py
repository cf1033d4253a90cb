"""A first look: train a small network with an XnIDR head on the built-in digits; watch it route.

Takes about half a minute on two cores.

    python examples/first_look.py
"""

import time

import torch

import xncaps
from xncaps.data import load_sample
from xncaps.metrics import top1

EPOCHS, BATCH, RATE = 5, 100, 3e-3


def pixels(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels as floats of mean 0 and deviation 1 (MNIST's)."""
    return (images.float() / 255 - 0.1307) / 0.3081


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        start, total = time.perf_counter(), 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = xncaps.margin_loss(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{EPOCHS}  loss {total / len(images):.4f}  {seconds:.1f} s")


@torch.no_grad()
def show_routing(model: torch.nn.Module, image: torch.Tensor, label: int) -> None:
    """How the couplings of one digit gather on its capsule, iteration by iteration."""
    print(f"\nOne test digit, a {label}: the mean coupling of the {model.head.capsules.caps_in}")
    print("primary capsules with each class, and the length of each output capsule.\n")
    routing = model.head.capsules.routing
    last = routing.iterations
    print("             " + "".join(f"{digit:>6}" for digit in range(10)))
    for routing.iterations in range(1, last + 1):
        lengths, couplings = model(image[None], return_couplings=True)
        row = "".join(f"{c:6.2f}" for c in couplings[0].mean(dim=0).tolist())
        print(f"iteration {routing.iterations}  {row}")
    print("lengths      " + "".join(f"{length:6.2f}" for length in lengths[0].tolist()))


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_sample("train")
    test_images, test_labels = load_sample("test")
    model = xncaps.create_model("convnet", head="xnidr", num_classes=10, in_channels=1)
    print(xncaps.summary(model, (1, 28, 28)), "\n")
    train(model, pixels(images), labels)

    model.eval()
    with torch.no_grad():
        scores = model(pixels(test_images))
    accuracy = top1(scores, test_labels).mean().item()
    print(f"\n{accuracy:.1%} of the {len(test_labels):,} test digits are right.")
    show_routing(model, pixels(test_images[0]), int(test_labels[0]))


if __name__ == "__main__":
    main()
