"""The system: its processor, the memory that was used, and files that are written whole."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

try:
    import resource
except ImportError:  # pragma: no cover
    resource = None  # type: ignore[assignment]


def peak_memory() -> int:
    """The most memory this process has held, in bytes."""
    try:
        # What getrusage tells on Linux may be the parent's, from before the program was loaded.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        pass
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_name() -> str:
    """The processor's name and vendor's family, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in lines.items()}
    name = values.get("model name", platform.machine())
    family = [f"{key} {values[key]}" for key in ("cpu family", "model") if key in values]
    return f"{name} ({', '.join(family)})" if family else name


@cache
def commit(folder: Path = Path(__file__).parent) -> str:
    """The git commit of this very code, marked if it has been changed; empty outside a checkout.

    It is asked for once: a process goes on with the code that it has loaded.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", os.fspath(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        # An installed package may lie inside the checkout of something else.
        git("ls-files", "--error-unmatch", ".")
        name = git("describe", "--always", "--exclude", "*")
        # Other files, such as those of the results, may have changed.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":/csrc")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{name}-dirty" if changed else name


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that at every instant there is the old one or the new one, whole."""
    target = Path(os.path.realpath(path))  # what a link points to
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:  # Ctrl-C too leaves nothing behind
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
