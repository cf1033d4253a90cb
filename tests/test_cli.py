"""The command line: what it prints, how it ends, and one line for whatever a user can do wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import xncaps
from xncaps.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(list(args))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((), ("--help",)):
        status, out, err = run(capsys, *args)
        assert (status, err) == (0, "")
        assert "paper" in out
        assert "summary" in out


@pytest.mark.parametrize("command", ["paper", "summary"])
def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"Example: xncaps {command}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"xncaps {xncaps.__version__}\n", "")


def test_paper_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "paper", "--table", "params")
    assert status == 0
    assert "2,994,864" in out


def test_paper_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "paper", "--json")
    assert status == 0
    tables = {table["name"]: table["rows"] for table in json.loads(out)}
    assert len(tables) == 11
    assert all(tables.values())


def test_summary_counts_what_the_library_counts(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["summary", "--model", "mobilenetv2", "--head", "xnodr"]
    status, out, _ = run(capsys, *args, "--json")
    assert status == 0
    assert json.loads(out)["params"] == 2_304_256
    _, text, _ = run(capsys, *args)
    assert "2,304,256" in text.splitlines()[-1]
    _, table, _ = run(capsys, *args, "--csv")
    assert table.splitlines()[-1].startswith("total,,,2304256,2304256,")


def test_summary_options_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--caps-in 6 --dim-in 5 --dim-out 7 --iterations 2 --width 0.5 --num-classes 3"
    sizes = "--in-channels 2 --image-size 20 --attach features --head xnboth --json"
    _, out, _ = run(capsys, "summary", *options.split(), *sizes.split())
    layer = json.loads(out)["rows"][-1]
    assert layer["output"] == [3, 7]
    assert layer["params"] == 6 * 3 * 5 * 7
    assert layer["binary_ops"] == 6 * 3 * 7 * (5 + 1)


def test_append_is_counted_without_a_warning_in_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["summary", "--model", "mobilenetv2", "--attach", "append", "--json"]
    status, out, err = run(capsys, *args)
    assert (status, err) == (0, "")
    assert json.loads(out)["trainable_params"] == 2_994_864


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("papr", "xncaps: No such command 'papr'. Did you mean 'paper'? Try 'xncaps --help'."),
        ("paper --tabel x", "xncaps: No such option: --tabel"),
        ("paper --x", "xncaps: No such option: --x. Try 'xncaps paper --help'."),
        (
            "summary --width 1e9",
            "xncaps: create_model: width must be a number above 0, 10,000 at most; "
            "got 1000000000.0.",
        ),
        (
            "summary --num-classes 99999999999999999999",
            "xncaps: create_model: num_classes must be at most 2147483647;"
            " got 99999999999999999999.",
        ),
        ("summary --iterations 2000", "xncaps: Invalid value for '--iterations'"),
        (
            "paper --table param",
            "xncaps: paper: table must be one of accuracy, cifar10, ablation-dr, params, flops,"
            " backbone, head-flops, speed-up, ablation-flops, fc-structure, shapes;"
            " got 'param'. Did you mean 'params'?",
        ),
        ("summary --image-size big", "xncaps: Invalid value for '--image-size'"),
        (
            "summary --model resnet",
            "xncaps: create_model: backbone must be one of convnet, mobilenetv2, resnet50,"
            " widenet, capsnet, xnornet; got 'resnet'. Did you mean 'resnet50'?",
        ),
        (
            "summary --num-classes 0",
            "xncaps: create_model: num_classes must be at least 1; got 0.",
        ),
        (
            "summary --json --csv",
            "xncaps: summary: output must be JSON or CSV; got both --json and --csv.",
        ),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], args: str, line: str
) -> None:
    status, out, err = run(capsys, *args.split())
    assert (status, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "xncaps", "paper", "--table", "fc-structure"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("xncaps: could not write or read: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux' /proc")
def test_too_little_memory_is_one_line() -> None:
    """A real limit, a little above what the imported program has."""
    program = """
import resource, sys
import xncaps.bench.train
from xncaps.cli.main import main
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 200 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.exit(main("bench train --batch-size 3600 --seconds 0 --threads 1".split()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "xncaps: there is not enough memory for this. Try smaller sizes.\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xncaps", "paper", "--table", "nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("xncaps: paper: table must be one of")
    assert "Traceback" not in done.stderr
