"""The paper's figures as it prints them, table by table.

"XnODR and XnIDR: Two Accurate and Fast Fully Connected Layers For Convolutional Neural Networks",
J. Sun, A. Pourramezan Fard, M. H. Mahoor.
"""

DATA_SETS = ("MNIST", "CIFAR-10", "MultiMNIST")

# Table "accuracy of different models": MNIST and CIFAR-10 top-1, MultiMNIST top-2.
CITED_ACCURACY: dict[str, tuple[str | None, str | None, str | None]] = {
    "Efficient-CapsNet": ("99.84%", None, "94.90%"),
    "HVCs": ("99.87%", "89.23%", None),
    "PLM(BCE+CB)": (None, "70.33%", "89.37%"),
    "CaiT-M-36 γ 224": (None, "99.40%", None),  # noqa: RUF001 (a gamma)
    "L1/FC": ("99.56%", "85.96%", "92.46%"),
    "ACGAN": ("96.25%", None, None),
    "EnsNet": ("99.84%", "76.25%", None),
    "LaNet-L": (None, "99.01%", None),
    "SCAE": ("99.0%", "33.48%", None),
    "capsnet+PA": ("99.67%", "85.69%", "94.88%"),
    "CPPN": ("97.00%", None, "65.6%"),
    "CapsuleNet": ("99.65%", "89.40%", "94.8%"),
    "XNOR-Net": (None, "89.83%", None),
}
ACCURACY: dict[str, tuple[str, str, str]] = {
    "ResNet-50": ("(99.57±0.02)%", "(94.19±0.1)%", "(99.12±0.03)%"),
    "ResNet_XnODR": ("(99.66±0.02)%", "(96.29±0.09)%", "(99.26±0.01)%"),
    "ResNet_XnIDR": ("(99.67±0.02)%", "(96.32±0.05)%", "(99.31±0.03)%"),
    "MobileNetV2": ("(99.61±0.02)%", "(95.39±0.09)%", "(98.62±0.05)%"),
    "MobileNetV2_XnODR": ("(99.73±0.01)%", "(96.05±0.04)%", "(99.13±0.03)%"),
    "MobileNetV2_XnIDR": ("(99.74±0.02)%", "(96.14±0.2)%", "(99.14±0.02)%"),
}

# Table "experiment results on CIFAR-10 from cited papers".
CIFAR10: dict[str, str] = {
    "Aff-CapsNets": "76.28%",
    "CapsNetSIFT": "91.27%",
    "HGCNet-91": "94.47%",
    "Ternary connect + Quantized backprop": "87.99%",
    "Greedy Algorithm for Quantizing": "88.88%",
    "SLB on ResNet20": "92.1%",
    "SLB on VGG small": "94.1%",
    "DoReFa-Net on VGG-11": "86.30%",
    "DoReFa-Net on ResNet14": "89.84%",
    "BootstrapNAS' ResNet-50": "93.70%",
    "ResNet50(A1)": "98.30%",
    "ResNet-50-SAM": "97.40%",
    "ResNet-50x1-ACG": "95.78%",
    "ResNet-50": "94.19%",
    "ResNet_XnODR": "96.29%",
    "ResNet_XnIDR": "96.32%",
}

# Table "FLOPs and Parameters", one entry for each data set.
FLOPS: dict[str, tuple[str, str, str]] = {
    "ResNet-50": ("3.865B", "3.865B", "1.012B"),
    "ResNet_XnODR": ("3.864B", "3.864B", "1.011B"),
    "ResNet_XnIDR": ("3.862B", "3.862B", "1.009B"),
    "MobileNetV2": ("312.25M", "312.25M", "83.62M"),
    "MobileNetV2_XnODR": ("312.60M", "312.60M", "83.96M"),
    "MobileNetV2_XnIDR": ("311.74M", "311.74M", "83.11M"),
}
PARAMETERS: dict[str, tuple[str, str, str]] = {
    "ResNet-50": ("26.16M", "26.16M", "26.16M"),
    "ResNet_XnODR": ("23.85M", "23.85M", "23.86M"),
    "ResNet_XnIDR": ("23.85M", "23.85M", "23.85M"),
    "MobileNetV2": ("3.05M", "3.05M", "3.05M"),
    "MobileNetV2_XnODR": ("2.99M", "2.99M", "2.99M"),
    "MobileNetV2_XnIDR": ("2.99M", "2.99M", "2.99M"),
}

# Table "FLOPs of the original FC layers and that of XnODR/XnIDR":
# total, binarization, XNOR BOPs, XNOR FLOPs, ratio to original FC.
HEAD_FLOPS: dict[str, tuple[str | None, ...]] = {
    "ResNet-50": ("5.25M", None, None, None, None),
    "ResNet_XnODR": ("3.97M", "3.13M", "41K", "640", "75.52%"),
    "ResNet_XnIDR": ("2.26M", "811.01K", "82K", "1280", "43.02%"),
    "MobileNetV2": ("1.64M", None, None, None, None),
    "MobileNetV2_XnODR": ("1.98M", "1.57M", "20K", "320", "120.89%"),
    "MobileNetV2_XnIDR": ("1.13M", "405.50K", "41K", "640", "68.86%"),
}

SPEED_UP: dict[str, str] = {
    "ResNet_XnODR": "63.99",
    "ResNet_XnIDR": "63.90",
    "MobileNetV2_XnODR": "63.98",
    "MobileNetV2_XnIDR": "63.80",
}

# Ablation, table "models with the typical DR mechanism": accuracy, FLOPs, parameters.
ABLATION_DR: dict[str, tuple[tuple[str, str, str], ...]] = {
    "ResNet_DR": (
        ("(99.69±0.05)%", "3.861B", "23.86M"),
        ("(96.19±0.07)%", "3.861B", "23.86M"),
        ("(99.27±0.009)%", "1.009B", "23.86M"),
    ),
    "MobileNetV2_DR": (
        ("(99.57±0.03)%", "311.29M", "2.99M"),
        ("(96.04±0.1)%", "311.29M", "2.99M"),
        ("(99.15±0.04)%", "82.66M", "2.99M"),
    ),
}

# Ablation, table "FLOPs of ResNet-50 and ResNet_DR".
ABLATION_FLOPS: dict[str, str] = {
    "ResNet-50": "5.25M",
    "ResNet_DR": "1.37M",
    "MobileNetV2": "1.64M",
    "MobileNetV2_DR": "682.9K",
}

# Appendix C.
FC_STRUCTURE: dict[str, tuple[int, ...]] = {
    "ResNet-50": (1024, 512, 10),
    "MobileNetV2": (512, 256, 128, 10),
}

# Table "size of variables", in the paper's 5-D notation.
SHAPES: dict[str, str] = {
    "I_Prim": "[bs, caps_in, dim_in]",
    "I_Cap": "[bs, caps_in, caps_out, 1, dim_in]",
    "W_Cap": "[caps_in, caps_out, dim_in, dim_out]",
    "I_Cap hat": "[bs, caps_in, caps_out, 1, dim_out]",
    "v": "[bs, 1, caps_out, 1, dim_out]",
    "b": "[bs, caps_in, caps_out, 1, 1]",
}
