"""Fine-tune a network of timm with an XnIDR head on the built-in digits, in a plain PyTorch loop.

The head learns for an epoch on a frozen backbone, then the backbone learns too, more slowly. Here
the weights are random, so that the first epoch achieves little; --pretrained begins with timm's,
which are downloaded. Takes about 15 seconds on two cores.

    python examples/finetune.py [--pretrained]
"""

import sys

import torch

import xncaps
from xncaps.data import load_sample
from xncaps.metrics import top1

try:
    import timm
except (ImportError, RuntimeError) as error:
    sys.exit(f"This example needs timm: pip install -c constraints.txt timm torchvision ({error})")

torch.manual_seed(0)
(images, labels), (test_images, test_labels) = load_sample("train"), load_sample("test")
model = timm.create_model("test_resnet", pretrained="--pretrained" in sys.argv, in_chans=1)
model = xncaps.attach_head(model, "xnidr", num_classes=10)
groups = xncaps.parameter_groups(model, lr=3e-3, backbone_lr=1e-3, weight_decay=0.01)
optimizer = torch.optim.AdamW(groups)

xncaps.freeze_backbone(model)
for epoch in range(1, 4):
    if epoch == 2:
        xncaps.unfreeze_backbone(model)
    model.train()
    for batch in torch.randperm(len(images)).split(50):
        loss = xncaps.margin_loss(model(images[batch] / 255), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = top1(model(test_images / 255), test_labels).mean().item()
    print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {accuracy:.1%}")
