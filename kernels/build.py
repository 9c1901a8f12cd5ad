"""Compiles kernels/csrc into shared libraries, once: nvcc for .cu, the C++ compiler for .cpp; loaded with ctypes.

A library is named by the hash of what goes into it (its source, the headers, macros, target and flags; for "native" the processor and
the compiler), so a changed source is a new file and two processes may build side by side. Looked for in kernels/prebuilt first (where
the Docker image builds ahead of time), then in the cache folder: PAGEWIRE_KERNEL_CACHE, else ~/.cache/pagewire/kernels.

    python -m kernels.build [--arch sm_90a,sm_80] [--cpu x86-64-v3] [--list] [--output DIR]     build what a server may load, ahead of time
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
NVCC_TIMEOUT_S = 900
CXX_TIMEOUT_S = 240
"""Seconds are usual; a worker waits for this while it starts, and where it ends torch serves."""
VERSION_TIMEOUT_S = 10
ARM = ("aarch64", "arm64")
CPU_TARGETS = {
    "cascadelake": "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx2 bmi1 bmi2 fma f16c movbe",
    "x86-64-v3": "avx2 bmi1 bmi2 fma f16c movbe",
}
"""What images are built for ahead of time, best first, and the flags of /proc/cpuinfo a processor must have to run it."""
CUDA_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler", "-fPIC")
# Not -ffast-math: GCC would link start-up code that turns subnormals off for the whole process.
CXX_FLAGS = (
    "-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread", "-shared",
)  # fmt: skip
MODULES = (
    "checked_copy", "cpu_thread_pool", "cpu_attention", "cpu_linear", "cpu_elementwise", "cpu_rotary_embedding", "cpu_decoder_layer",
    "cpu_sampling", "cache_ops", "piece_transfer", "device_memory", "rms_norm", "rotary_embedding", "silu_and_mul", "quantize_rows",
    "paged_attention", "flash_attention_sm90", "sampling", "skinny_linear",
)  # fmt: skip
"""Files of this package that name, in `libraries()`, what a server may load."""


class KernelBuildError(RuntimeError):
    """No compiler, or the compiler refused; the message says what to do."""


class KernelError(RuntimeError):
    """A kernel's launcher reported an error: bad arguments or a CUDA error."""


@dataclass(frozen=True)
class Library:
    """One shared library to build: a source file of csrc and the macros it is specialised with."""

    source: str
    defines: Mapping[str, int | str] = field(default_factory=dict)
    only_arch: str | None = None
    """The one CUDA target whose instructions it is written in; None: any."""

    @property
    def is_cuda(self) -> bool:
        return self.source.endswith(".cu")


def device_arch() -> str:
    """The nvcc target for the current GPU, or PAGEWIRE_CUDA_ARCH (e.g. sm_90a) where there is none or another one is wanted."""
    if arch := os.environ.get("PAGEWIRE_CUDA_ARCH"):
        return arch
    import torch

    if not torch.cuda.is_available():
        return "sm_90a"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def find_nvcc() -> Path | None:
    """CUDA_HOME, PATH, the usual folder, then the packages nvidia-cuda-nvcc installs into site-packages."""
    candidates = [Path(home) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    spec = importlib.util.find_spec("nvidia")
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            candidates += sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
    return next((path for path in candidates if path.is_file()), None)


def find_cxx() -> Path | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return Path(path)
    return None


def _cpu_name() -> str:
    """What -march=native means here; a library built on another processor must not be found."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "CPU implementer", "CPU part", "Features")  # x86 has the first two, ARM the others
    return platform.machine() + "".join(next((line for line in lines if line.startswith(key)), "") for key in keys)


def cpu_flags() -> set[str]:
    """What Linux says the processor can do, in its words; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def cpu_targets() -> list[str]:
    """The targets besides "native" that this processor runs, best first."""
    if platform.machine() in ARM:
        return ["armv8-a"]
    flags = cpu_flags()
    return [target for target, needed in CPU_TARGETS.items() if flags.issuperset(needed.split())]


def _command(library: Library, arch: str) -> list[str]:
    source = str(SOURCES / library.source)
    defines = [f"-D{name}={value}" for name, value in sorted(library.defines.items())]
    if library.is_cuda:
        nvcc = find_nvcc()
        if nvcc is None:
            raise KernelBuildError(
                f"building {library.source} needs nvcc, the CUDA compiler, and none was found. Set CUDA_HOME to a CUDA toolkit, or "
                "install the compiler with `pip install 'pagewire[nvcc]'`; the Docker image for GPUs has the kernels built in."
            )
        target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
        # The compiler of the pip packages does not know its own library folder.
        lib = nvcc.parent.parent / "lib"
        where = [f"-L{lib}"] if (lib / "libcudart_static.a").is_file() else []
        return [str(nvcc), target, *CUDA_FLAGS, *where, *defines, source]
    cxx = find_cxx()
    if cxx is None:
        raise KernelBuildError(f"building {library.source} needs a C++ compiler; install g++ or clang++, or set CXX.")
    # Clang for ARM takes "native" as a CPU, not as an architecture.
    target = "-mcpu=native" if arch == "native" and platform.machine() in ARM else f"-march={arch}"
    return [str(cxx), target, *CXX_FLAGS, *defines, source]


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{compiler} --version did not end within {VERSION_TIMEOUT_S} s; set CXX to a compiler that works") from None


@functools.cache
def _sources_digest(suffixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in suffixes:
            digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def library_name(library: Library, arch: str) -> str:
    """The file name that stands for these sources, macros and target. The compiler counts for "native" only, so that a machine without
    one finds what was built for it."""
    parts = [repr(sorted(library.defines.items())), repr(CUDA_FLAGS if library.is_cuda else CXX_FLAGS)]
    if library.is_cuda:
        header = (SOURCES / library.source).read_bytes()
        parts += [arch, hashlib.sha256(header).hexdigest(), _sources_digest((".cuh", ".h"))]
    else:
        parts += [arch, (SOURCES / library.source).read_text(), _sources_digest((".h",))]
        if arch == "native":
            cxx = find_cxx()
            parts += [_cpu_name(), _compiler_version(str(cxx)) if cxx else ""]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return f"{Path(library.source).stem}-{key}.so"


def cache_folder() -> Path:
    if folder := os.environ.get("PAGEWIRE_KERNEL_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "kernels"
    except RuntimeError:  # a user without a home, as some clusters run containers
        raise KernelBuildError(
            "no home folder to keep compiled kernels in; set PAGEWIRE_KERNEL_CACHE to a folder that can be written"
        ) from None


def build(library: Library, arch: str, folder: Path) -> Path:
    """Compile into `folder` unless it is there. Raises KernelBuildError with what the compiler said."""
    path = folder / library_name(library, arch)
    if path.is_file():
        return path
    command, timeout_s = _command(library, arch), NVCC_TIMEOUT_S if library.is_cuda else CXX_TIMEOUT_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{path.name}.lock").open("w")
    except OSError as error:
        raise KernelBuildError(f"cannot write to {folder} ({error}); set PAGEWIRE_KERNEL_CACHE to a folder that can be written") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            if path.is_file():  # another process was faster
                return path
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=timeout_s, check=False)
            if done.returncode != 0:
                raise KernelBuildError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-4000:]}")
            os.replace(unfinished, path)
        except subprocess.TimeoutExpired:
            raise KernelBuildError(f"{' '.join(command)} did not end within {timeout_s} s") from None
        finally:
            unfinished.unlink(missing_ok=True)
            (folder / f"{path.name}.lock").unlink(missing_ok=True)
    return path


_loaded: dict[tuple[str, tuple[tuple[str, int | str], ...], str], ctypes.CDLL] = {}


def load(library: Library, arch: str | None = None) -> ctypes.CDLL:
    """The built library, built now if need be."""
    target = (arch or device_arch()) if library.is_cuda else "native"
    key = (library.source, tuple(sorted(library.defines.items())), target)
    if key not in _loaded:
        _loaded[key] = ctypes.CDLL(str(find_prebuilt(library, target) or build(library, target, cache_folder())))
    return _loaded[key]


def find_prebuilt(library: Library, arch: str) -> Path | None:
    """What was built ahead of time for this machine; for C++ the best of CPU_TARGETS that it runs."""
    targets = [arch] if library.is_cuda else cpu_targets()
    return next((path for target in targets if (path := PREBUILT / library_name(library, target)).is_file()), None)


def check(message: bytes | None) -> None:
    """Raise what a launcher returned: every launcher of csrc returns NULL, or a text that says what was wrong."""
    if message is not None:
        raise KernelError(message.decode())


def launch(launcher: Callable[..., bytes | None], device: torch.device, *arguments: object) -> None:
    """Run a launcher, whose last argument is the stream, on the current stream of `device`; raise what it returns."""
    import torch

    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(launcher, device, *arguments)
        return
    # Microseconds faster than torch.cuda.current_stream(device).cuda_stream, and what torch's own generated code calls.
    check(launcher(*arguments, torch._C._cuda_getCurrentRawStream(device.index)))


# ---- ahead of time --------------------------------------------------------------------------------------------------------
def all_libraries() -> Iterator[Library]:
    for name in MODULES:
        yield from importlib.import_module(f"kernels.{name}").libraries()


def _jobs(cuda_archs: Sequence[str], cpu_targets: Sequence[str]) -> list[tuple[Library, str]]:
    return [
        (library, arch)
        for library in all_libraries()
        for arch in (cuda_archs if library.is_cuda else cpu_targets)
        if library.only_arch in (None, arch)
    ]


def _title(library: Library, arch: str) -> str:
    return " ".join([library.source, arch, *(f"{name}={value}" for name, value in sorted(library.defines.items()))])


def _build_all(jobs: Sequence[tuple[Library, str]], folder: Path) -> list[str]:
    """A line for each as it ends; returns what failed."""
    failures = []

    def timed(library: Library, arch: str) -> tuple[Path, float]:
        start_s = time.monotonic()
        return build(library, arch, folder), time.monotonic() - start_s

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = {pool.submit(timed, *job): job for job in jobs}
        for number, done in enumerate(as_completed(running), 1):
            title = _title(*running[done])
            try:
                path, seconds = done.result()
            except KernelBuildError as error:
                failures.append(title)
                print(f"[{number}/{len(jobs)}] {title}: failed\n{error}", file=sys.stderr, flush=True)
            else:
                print(f"[{number}/{len(jobs)}] {title}: {path.name}, {path.stat().st_size >> 10} KiB, {seconds:.1f} s", flush=True)
    return failures


def _targets(text: str | None, default: Sequence[str]) -> list[str]:
    return list(default) if text is None else [name for name in text.split(",") if name not in ("", "none")]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 0: all is built; 1: something failed, its message is on stderr; 2: bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description="Build what a server may load, ahead of time.")
    parser.add_argument("--arch", help="CUDA targets such as sm_90a,sm_80, or none; default: this machine's GPU, none without nvcc")
    parser.add_argument(
        "--cpu", help=f"C++ targets ({', '.join(CPU_TARGETS)}, armv8-a, native), all, or none; default: this machine's best"
    )
    parser.add_argument(
        "--output", type=Path, default=PREBUILT, help="folder for the libraries (default: kernels/prebuilt, where they are found)"
    )
    parser.add_argument("--list", action="store_true", help="say what would be built and whether it is there, and build nothing")
    options = parser.parse_args(arguments)
    runnable = cpu_targets()[:1] or ["native"]
    every = ["armv8-a"] if platform.machine() in ARM else list(CPU_TARGETS)
    cpu = every if options.cpu == "all" else _targets(options.cpu, runnable)
    jobs = _jobs(_targets(options.arch, [device_arch()] if find_nvcc() else []), cpu)
    if options.list:
        for library, arch in jobs:
            name = library_name(library, arch)
            print(f"{_title(library, arch)}: {name}, {'there' if (options.output / name).is_file() else 'missing'}")
        return 0
    failures = _build_all(jobs, options.output)
    if failures:
        print(f"{len(failures)} of {len(jobs)} failed: {', '.join(failures)}", file=sys.stderr)
        return 1
    print(f"{len(jobs)} libraries in {options.output}")
    return 0


if __name__ == "__main__":
    # Under its package's name, so that there is one KernelBuildError and one Library.
    sys.exit(importlib.import_module("kernels.build").main())
