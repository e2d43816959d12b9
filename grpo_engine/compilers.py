"""Whether this machine has what kernels are compiled with when they are first needed."""

from __future__ import annotations

import os
import shutil


def has_compiler() -> bool:
    """Whether torch and Triton will find a C compiler: the one that $CC names, else gcc or clang.

    They look only when the first kernel is made, and say it then in their own words.
    """
    named = os.environ.get("CC")
    return any(map(shutil.which, [named] if named else ["gcc", "clang"]))
