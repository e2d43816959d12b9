"""What kernels are compiled with when they are first needed, and where they are kept."""

from __future__ import annotations

import os
import shutil

CODE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables of the folders of compiled code, and the names of these in our cache. Where the second is not set, inductor
sets it once it compiles something: a process that found all its code compiled looked for our own kernels elsewhere."""


def has_compiler() -> bool:
    """Whether torch and Triton will find a C compiler: the one that $CC names, else gcc or clang.

    They look only when the first kernel is made, and say it then in their own words.
    """
    named = os.environ.get("CC")
    return any(map(shutil.which, [named] if named else ["gcc", "clang"]))
