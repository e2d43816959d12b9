#!/usr/bin/env python3
"""Collect everything that a GPU machine without a package index needs, into one folder of parts that can be carried.

Run it on Linux (x86-64) with an index, with the Python release of the other machine:

    python3.12 scripts/pack_offline.py carried
    python3.12 scripts/pack_offline.py carried --torch-is-there --lean --architecture 90 --part-size 58M

The first carries everything, torch and CUDA's libraries included. The second is for a machine that has torch, and for
dense models such as Llama and Qwen on Hopper. On the other machine: `bash carried/unpack_offline.sh FOLDER`.
docs/offline.md tells the whole way.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpu_code import prune

ROOT = Path(__file__).resolve().parents[1]
UNPACK = Path(__file__).with_name("unpack_offline.sh")
PINS = ROOT / "constraints-gpu.txt"
TORCH = re.compile(r"torch|torchvision|torchaudio|triton|(nvidia|cuda)-(?!ml-py).*")
"""torch and what comes with it."""
NOT_FOR_DENSE_MODELS = re.compile(
    r"flashinfer-python|nvidia-cutlass-dsl.*|nvidia-cudnn-frontend|cuda-tile|quack-kernels|tilelang|humming-kernels|"
    r"tokenspeed-.*|torch-c-dlpack-ext|torchcodec|z3-solver|pynvvideocodec|pyelftools"
)
"""Requirements of vLLM that only mixtures of experts, Blackwell, video, or a quicker sampler use."""
PARTS_NOT_FOR_DENSE_MODELS = (
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/_moe_C",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/deep_gemm",
    "vllm/vllm-rs",
)
"""Files of vLLM's wheel, by how their names begin; FlashAttention 2 is for GPUs before Hopper."""
LEAN_ENVIRONMENT = ("VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_USE_DEEP_GEMM=0")
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def main() -> None:
    """Pack what the command line asks for."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        bundle = Path(scratch) / "bundle"
        wheels = bundle / "wheels"
        wheels.mkdir(parents=True)
        _collect(wheels, list(_pins(PINS.read_text(), options)))
        if options.architecture or options.lean:
            dropped = PARTS_NOT_FOR_DENSE_MODELS if options.lean else ()
            for wheel in sorted(wheels.glob("*.whl")):
                slim(wheel, options.architecture, dropped)
        (bundle / "environment").write_text("\n".join(LEAN_ENVIRONMENT if options.lean else ()) + "\n")
        for path in options.also:
            shutil.copytree(path, bundle / "also" / path.name) if path.is_dir() else _copy(path, bundle / "also")
        parts = write_parts(bundle, options.folder, options.part_size)
    shutil.copy(UNPACK, options.folder)
    total = sum(part.stat().st_size for part in parts)
    print(f"{options.folder}: {len(parts)} parts, {total / 1e6:,.0f} MB; there: bash {UNPACK.name} FOLDER")


def slim(wheel: Path, architecture: int | None, dropped: tuple[str, ...]) -> None:
    """Rewrite a wheel if parts of it can be dropped: files that begin with `dropped`, and other GPUs' code."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        libraries = [name for name in names if re.search(r"\.so(\.\d+)*$", name)] if architecture else []
        changed: dict[str, bytes] = {}
        for name in libraries:
            library = bytearray(archive.read(name))
            if not name.startswith(dropped) and prune(library, architecture or 0):
                changed[name] = bytes(library)
        kept = [name for name in names if not name.startswith(dropped)]
        if not changed and len(kept) == len(names):
            return
        slimmer = wheel.with_suffix(".slim")
        changed[record] = _record(archive.read(record).decode(), kept, changed)
        with zipfile.ZipFile(slimmer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as result:
            for name in kept:
                result.writestr(archive.getinfo(name), changed.get(name) or archive.read(name), zipfile.ZIP_DEFLATED)
    before, after = wheel.stat().st_size, slimmer.stat().st_size
    slimmer.replace(wheel)
    print(f"{wheel.name}: {before / 1e6:.0f} MB → {after / 1e6:.0f} MB")


def write_parts(bundle: Path, folder: Path, part_size: int) -> list[Path]:
    """The bundle as one tar archive in parts of a size, with their checksums in SHA256SUMS."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    with subprocess.Popen(["tar", "-C", str(bundle), "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
        split = ["split", f"--bytes={part_size}", "--numeric-suffixes", "--suffix-length=3", "-", "part-"]
        subprocess.run(split, stdin=archive.stdout, cwd=folder, check=True)
    if archive.returncode:
        raise SystemExit(f"tar ended with exit code {archive.returncode}")
    parts = sorted(folder.glob("part-*"))
    with (folder / "SHA256SUMS").open("w") as sums:
        subprocess.run(["sha256sum", *(part.name for part in parts)], stdout=sums, cwd=folder, check=True)
    return parts


def _collect(wheels: Path, pins: Sequence[str]) -> None:
    """Wheels of the pinned packages, and ours; those that an index has only as source are built here."""
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "-w", str(wheels)]
    subprocess.run([*pip, "--quiet", *pins], check=True)
    subprocess.run([*pip, "--quiet", str(ROOT)], check=True)


def _pins(text: str, options: argparse.Namespace) -> Iterator[str]:
    """Packages to carry: those that the other machine has in the same release, or does not need, are left out."""
    there = {_name(line): line.strip() for line in _lines(options.there.read_text())} if options.there else {}
    for pin in _lines(text):
        name = _name(pin)
        same = there.get(name, "").partition("==")[2].partition("+")[0] == pin.partition("==")[2]
        with_torch = options.torch_is_there and TORCH.fullmatch(name)
        for_others = options.lean and NOT_FOR_DENSE_MODELS.fullmatch(name)
        if not (same or with_torch or for_others or name in options.without):
            yield pin


def _record(text: str, kept: Iterable[str], changed: dict[str, bytes]) -> bytes:
    """A wheel's list of its files, with the digests of those that are changed."""
    names, output = set(kept), io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    for name, digest, size in csv.reader(io.StringIO(text)):
        if name in changed:
            hashed = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
            writer.writerow((name, f"sha256={hashed}", len(changed[name])))
        elif name in names:
            writer.writerow((name, digest, size))
    return output.getvalue().encode()


def _lines(text: str) -> Iterator[str]:
    yield from (line.strip() for line in text.splitlines() if "==" in line and not line.startswith("#"))


def _name(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; ]", pin.strip())[0]).lower()


def _copy(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG])", text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 58M or 4G")
    return int(found[1]) * UNITS[found[2]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the parts go")
    parser.add_argument("--torch-is-there", action="store_true", help="carry neither torch nor CUDA's libraries")
    parser.add_argument(
        "--there",
        type=Path,
        metavar="FILE",
        help="what `pip list --format=freeze` prints on the other machine: what it has in the same release stays here",
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="more packages that are not carried")
    parser.add_argument(
        "--lean", action="store_true", help="leave out of vLLM what dense models on Hopper do not use (FlashInfer, …)"
    )
    parser.add_argument(
        "--architecture",
        type=int,
        metavar="N",
        help="keep GPU code for this one alone: 80 A100, 89 L40S, 90 H100, H200",
    )
    parser.add_argument("--part-size", type=_bytes, default="2G", metavar="SIZE", help="of each part (default: 2G)")
    parser.add_argument(
        "--also", nargs="+", type=Path, default=[], metavar="PATH", help="files or folders to carry along, e.g. a model"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="FOLDER", help="for what comes between; default: the usual /tmp"
    )
    options = parser.parse_args()
    if options.lean and options.architecture not in (None, 90):
        parser.error(f"--architecture {options.architecture} with --lean: what is left runs on Hopper (90) alone")
    for path in options.also:
        if not path.exists():
            parser.error(f"--also {path}: no such file or folder")
    return options


if __name__ == "__main__":
    main()
