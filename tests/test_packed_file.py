"""Packed files: round trips, size, digest, damage and hostile content."""

import dataclasses
import hashlib
import json
import pickle
import re
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import xncaps
from cards import card_for
from pack_cases import assert_close, create, live
from xncaps.deploy.packed_file import check_file, read_packed, write_packed
from xncaps.errors import RunError

HEADS = ("linear", "fc", "dr", "xnodr", "xnidr", "xnboth")
SMALL = {"caps_in": 8, "dim_out": 4}
NETWORKS = [
    *(("convnet", head, "replace", 28, {}) for head in HEADS),
    *(("convnet", head, "append", 28, {}) for head in ("dr", "xnboth")),
    *(("convnet", head, "features", 28, {}) for head in ("xnodr", "xnidr")),
    ("convnet", "xnodr", "replace", 28, {"scale": "learned", "routing_bias": True}),
    ("convnet", "xnidr", "replace", 28, {"binarizer": "midrange", "iterations": 2}),
    ("mobilenetv2", "xnodr", "replace", 32, {}),
    ("mobilenetv2", "fc", "replace", 32, {"hidden": [8, 6]}),
    ("resnet50", "xnboth", "features", 32, {}),
    ("widenet", "xnodr", "features", 28, {"width": 0.125, "mirror": True}),
    ("capsnet", "xnodr", "replace", 28, {}),
    ("xnornet", None, "replace", 32, {"width": 0.25, "binarizer": "approxsign"}),
]


def a_network(backbone, head, attach, size, options):
    torch.manual_seed(0)
    is_small = backbone == "convnet"
    has_caps = head not in ("linear", "fc", None) and backbone != "capsnet"
    options = {**(SMALL if has_caps else {}), **options, **({"width": 0.25} if is_small else {})}
    network = live(create(backbone, head, attach, size, **options), size).eval()
    return network, card_for(network, backbone, head, attach, options)


def tiny(tmp_path):
    """A network of some hundred bytes, its card and its file."""
    options = {"width": 0.02, "caps_in": 2, "dim_in": 2, "dim_out": 2}
    torch.manual_seed(0)
    network = xncaps.create_model("convnet", "xnodr", 2, **options).eval()
    card = card_for(network, "convnet", "xnodr", options=options)
    path = tmp_path / "tiny.safetensors"
    write_packed(path, network, card)
    return network, card, path


@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: "-".join(map(str, case[:3])))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_round_trip(tmp_path, case, dtype):
    network, card = a_network(*case)
    path, size = tmp_path / "x.safetensors", case[3]
    write_packed(path, network, card, dtype)
    got_card, got = read_packed(path)
    assert got_card == card
    images = torch.randn(3, 1, size, size)
    packed = xncaps.pack(network, scales=dtype)
    if dtype == "float16":  # what is not bits is rounded, and worked with in float32
        state = packed.state_dict()
        halves = {k: v.half().to(v.dtype) if v.is_floating_point() else v for k, v in state.items()}
        packed.load_state_dict(halves)
    assert not got.training
    assert got.scores == network.scores
    assert not any(parameter.requires_grad for parameter in got.parameters())
    assert torch.equal(got(images), packed(images))
    assert torch.equal(xncaps.load(path)(images), got(images))


def test_the_file_is_as_large_as_summary_says(tmp_path):
    for case in NETWORKS[:8]:
        network, card = a_network(*case)
        path, size = tmp_path / "x.safetensors", case[3]
        write_packed(path, network, card)
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        assert len(content) - header == xncaps.summary(network, (1, size, size)).packed_bytes


def test_one_standard_file_with_bits_card_version_and_digest(tmp_path):
    network, card, path = tiny(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("head.capsules.bits").dtype == torch.uint8
    assert metadata["format"] == "xncaps-packed"
    assert metadata["version"] == "1"
    assert json.loads(metadata["card"])["network"]["head"] == "xnodr"
    assert json.loads(metadata["card"])["facts"]["classes"] == ["0", "1"]
    # By the definition: of the file, with the 64 characters of the digest as zeros.
    content = path.read_bytes()
    (found,) = re.findall(rb'"digest":"([0-9a-f]{64})"', content)
    assert content.count(found) == 1
    digest = hashlib.sha256(content.replace(found, b"0" * 64)).hexdigest()
    assert metadata["digest"] == digest == found.decode()
    write_packed(tmp_path / "again.safetensors", network, card)
    assert (tmp_path / "again.safetensors").read_bytes() == content


def is_one_line(error):
    return "\n" not in str(error) and str(error).endswith(".") and len(str(error)) < 500


def test_every_truncation_is_noticed(tmp_path):
    _, _, path = tiny(tmp_path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(RunError, match=r"tiny\.safetensors: not a packed") as caught:
            read_packed(path)
        assert is_one_line(caught.value)
    path.write_bytes(content + b"\0")
    with pytest.raises(RunError, match="it is damaged"):
        read_packed(path)


def test_every_flipped_bit_is_noticed(tmp_path):
    _, _, path = tiny(tmp_path)
    content = bytearray(path.read_bytes())
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            with pytest.raises(xncaps.InputError):
                check_file(bytes(content))
            if bit == place % 8:
                path.write_bytes(content)
                with pytest.raises(RunError, match=r"tiny\.safetensors: not a packed") as caught:
                    read_packed(path)
                assert is_one_line(caught.value)
            content[place] ^= 1 << bit
    path.write_bytes(content)
    read_packed(path)


def test_the_digest_is_compared_case_by_case(tmp_path):
    _, _, path = tiny(tmp_path)
    content = path.read_bytes()
    (found,) = re.findall(rb'"digest":"([0-9a-f]{64})"', content)
    path.write_bytes(content.replace(found, found.upper()))
    with pytest.raises(RunError, match="its digest is damaged"):
        read_packed(path)


def rewrite(path, change):
    """Change the header, and give the file the digest that goes with it."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header["__metadata__"]["digest"] = "0" * 64
    data = change(header, data) or data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + data
    digest = hashlib.sha256(content).hexdigest().encode()
    path.write_bytes(content.replace(b"0" * 64, digest))


def on_card(**changes):
    """A change of values on the card; dots go into what is inside."""

    def change(header, data):
        card = json.loads(header["__metadata__"]["card"])
        for name, value in changes.items():
            *parts, last = name.split("__")
            inner = card
            for part in parts:
                inner = inner[part]
            inner[last] = value
        header["__metadata__"]["card"] = json.dumps(card)

    return change


def other_dtype(header, data):
    header["head.capsules.bits"]["dtype"] = "I8"


def lost_tensor(header, data):
    del header["head.capsules.bits"]


def another_tensor(header, data):
    header["surprise"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(data), len(data)]}


def outside(header, data):
    header["head.capsules.bits"]["data_offsets"] = [0, 2**40]


def overlapping(header, data):
    header["head.capsules.bits"]["data_offsets"] = header["head.capsules.scales"]["data_offsets"]


def huge_shape(header, data):
    header["head.capsules.bits"]["shape"] = [2**40]


def deep_card(header, data):
    header["__metadata__"]["card"] = "[" * 100_000


def no_card(header, data):
    header["__metadata__"]["card"] = "{}"


def other_version(header, data):
    header["__metadata__"]["version"] = "2"


HOSTILE = {
    "other dtype": (other_dtype, "bits' is not the tensor of its network"),
    "lost tensor": (lost_tensor, "."),
    "another tensor": (another_tensor, "its tensors are not those of its network"),
    "offsets outside": (outside, "."),
    "offsets that overlap": (overlapping, "."),
    "huge shape": (huge_shape, "."),
    "deep card": (deep_card, "card: text must hold what xncaps writes"),
    "no card": (no_card, "card: text must hold what xncaps writes"),
    "other version": (other_version, "it is of format 'xncaps-packed', version '2'; this xncaps"),
    "many capsules": (on_card(network__options={"caps_in": 2**31 - 1}), "."),
    "very many capsules": (on_card(network__options={"caps_in": 2**62}), "caps_in must be at most"),
    "wide": (on_card(network__options={"width": 1e6}), "."),
    "much wider": (on_card(network__options={"width": 1e300}), "."),
    "long lists": (on_card(network__options={"hidden": [1] * 10**5}), "short lists of numbers"),
    "large images": (on_card(network__image_size=10**6), "images must be at most 1024 px"),
    "many classes": (on_card(network__num_classes=10**9), "classes and channels of its data"),
    "unknown network": (on_card(network__backbone="os.system"), "backbone must be one of"),
    "unknown head": (on_card(network__head="__import__"), "head must be one of"),
    "unknown option": (on_card(network__options={"eval": "1"}), "option must be one"),
    "an object as an option": (
        on_card(network__options={"caps_in": {}}),
        "options must be numbers",
    ),
    "more in the network": (on_card(network__module="os"), "have what create_model takes"),
    "more on the card": (on_card(run="rm"), "hold what xncaps writes"),
    "many iterations": (on_card(network__options={"iterations": 1001}), "be at most 1000"),
    "no iterations": (on_card(network__options={"iterations": "9"}), "iterations must be at most"),
    "two channels": (
        on_card(network__in_channels=2, facts__shape=[2, 28, 28], facts__mean=[0.0, 0.0]),
        "values of the wrong kind",
    ),
    "four channels": (
        on_card(
            network__in_channels=4,
            facts__shape=[4, 28, 28],
            facts__mean=[0.1] * 4,
            facts__std=[0.1] * 4,
        ),
        "images must have 1 channel or 3",
    ),
    "pairs of one class": (
        on_card(network__num_classes=1, facts__classes=["a"], facts__pairs=True),
        "values of the wrong kind",
    ),
    "classes twice": (on_card(facts__classes=["a", "a"]), "values of the wrong kind"),
    "classes that move the cursor": (on_card(facts__classes=["a", "\x1b[31m"]), "can be shown"),
    "classes of stray bytes": (on_card(facts__classes=["a", "\ud800"]), "can be shown"),
    "a truth as a size": (on_card(facts__shape=[True, 28, 28]), "values of the wrong kind"),
    "a tiny deviation": (on_card(facts__std=[1e-300]), "values of the wrong kind"),
    "a huge mean": (on_card(facts__mean=[1e300]), "values of the wrong kind"),
    "a number as the head": (on_card(network__head=5), "head must be one of"),
    "no number": (on_card(facts__mean=[float("nan")]), "values of the wrong kind"),
    "no shape": (on_card(facts__shape=[1, 0, 28]), "values of the wrong kind"),
    "other scores": (on_card(scores="logits"), "its network gives lengths, not logits"),
    "unknown scores": (on_card(scores="?"), "scores must be one of"),
    "unknown loss": (on_card(loss="?"), "loss must be one of"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    _, _, path = tiny(tmp_path)
    change, words = HOSTILE[name]
    rewrite(path, change)
    with pytest.raises(RunError, match=words) as caught:
        read_packed(path)
    assert is_one_line(caught.value)


def test_a_change_that_is_none_is_taken(tmp_path):
    """Or the tests above would see files that nobody can read."""
    _, card, path = tiny(tmp_path)
    rewrite(path, lambda header, data: None)
    assert read_packed(path)[0] == card
    rewrite(path, on_card(loss="cross_entropy"))
    assert read_packed(path)[0] == dataclasses.replace(card, loss="cross_entropy")


MEASURE = """
import sys
from xncaps.deploy.packed_file import read_packed
from xncaps.errors import RunError
from xncaps.system import peak_memory
try:
    read_packed(sys.argv[1])  # imports what is imported late
except RunError:
    pass
before = peak_memory()
for path in sys.argv[2:]:
    try:
        read_packed(path)
    except RunError as error:
        continue
    sys.exit(f"{path} was read")
print(peak_memory() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory as Linux tells it")
def test_a_header_cannot_make_it_take_memory(tmp_path):
    paths = []
    for number, (change, _) in enumerate(HOSTILE.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, _, path = tiny(folder)
        rewrite(path, change)
        paths.append(path)
    for name, content in {
        "long": struct.pack("<Q", 2**62) + b"{}",
        "longer": struct.pack("<Q", 2**64 - 1) + b"{}",
        "lists": struct.pack("<Q", 2**23) + b"[" + b"1," * 2**22,
        "short lists": struct.pack("<Q", 2**20) + b'{"a":[' + b"[]," * 349_522 + b"1]}",
    }.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content)
    _, _, good = tiny(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, good, *paths], capture_output=True, text=True, check=True
    )
    largest = max(path.stat().st_size for path in paths)
    assert int(done.stdout) < 40e6 + 3 * largest


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code in a file was run",))


def test_other_files_are_refused_in_a_line(tmp_path):
    network, _, path = tiny(tmp_path)
    safetensors.torch.save_file(dict(network.state_dict()), path)
    with pytest.raises(RunError, match="not written by xncaps export --format packed"):
        xncaps.load(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RunError, match="not a packed network that can be used"):
        xncaps.load(path)
    for content in (b"", b"\0" * 8, b"\0" * 100, b"hello", b"\x02\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        with pytest.raises(RunError, match="not a packed network") as caught:
            xncaps.load(path)
        assert is_one_line(caught.value)
    with pytest.raises(xncaps.InputError, match="MODEL must be the folder of a run, a packed file"):
        xncaps.load(tmp_path / "none")


def test_folders_of_the_one_who_trained_it_stay_at_home(tmp_path):
    _, card, _ = tiny(tmp_path)
    facts = dataclasses.replace(card.facts, name="folder:/home/me/secret")
    private = dataclasses.replace(card, facts=facts, data={"name": "folder:/home/me/secret"})
    assert "secret" in private.to_json()
    assert "secret" not in private.portable().to_json()
    assert card.portable() == card


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    network, card = a_network("convnet", "linear", "replace", 28, {})
    with torch.no_grad():
        network.head.linear.weight.mul_(1e8)
    path = tmp_path / "x.safetensors"
    with pytest.raises(xncaps.InputError, match="dtype must be float32 for numbers above 65504"):
        write_packed(path, network, card, "float16")
    assert not path.exists()
    write_packed(path, network, card)


def test_float16_is_half_as_large_and_close(tmp_path):
    network, card = a_network("convnet", "xnodr", "replace", 28, {})
    sizes, outputs = [], []
    for dtype in ("float32", "float16"):
        path = tmp_path / f"{dtype}.safetensors"
        write_packed(path, network, card, dtype)
        sizes.append(path.stat().st_size)
        outputs.append(xncaps.load(path)(torch.randn(4, 1, 28, 28, generator=torch.manual_seed(0))))
    assert sizes[1] < 0.6 * sizes[0]
    assert_close(*outputs, within=5e-3)
