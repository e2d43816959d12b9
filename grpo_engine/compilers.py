"""What kernels are compiled with when they are first needed, and where they are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

CODE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables of the folders of compiled code, and the names of these in our cache. Where the second is not set, inductor
sets it once it compiles something: a process that found all its code compiled looked for our own kernels elsewhere."""


_ASSEMBLER = "TRITON_PTXAS_PATH"


def settle_assembler(environment: MutableMapping[str, str]) -> None:
    """Have Triton use torch's ptxas from the first kernel on, where torch brings one; what the user set is kept.

    Torch sets it only when inductor makes a kernel, and Triton's names for kernels in its cache have the version that
    it asked first. So a vLLM that found its model compiled looked for all its kernels under other names than the one
    that had compiled it, and made them again: 11 s at the first restart on a machine (torch 2.11, Triton 3.6).
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return
    ptxas = Path(torch.origin).with_name("bin") / "ptxas"
    if os.access(ptxas, os.X_OK):
        environment.setdefault(_ASSEMBLER, str(ptxas))


def has_compiler() -> bool:
    """Whether torch and Triton will find a C compiler: the one that $CC names, else gcc or clang.

    They look only when the first kernel is made, and say it then in their own words.
    """
    named = os.environ.get("CC")
    return any(map(shutil.which, [named] if named else ["gcc", "clang"]))
