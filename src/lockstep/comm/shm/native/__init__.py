"""The library that hatch_build.py compiles from shm.c when the package is built or installed.

A library that is absent, damaged or of another source is never used; `why_not` says so, and the workers use Gloo.
Only Python's own library is imported here.
"""

import ctypes
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_FOLDER = Path(__file__).parent
_IS_CLONE = (_FOLDER.parents[4] / "hatch_build.py").exists()
_OPTIONS = "-e ." if _IS_CLONE else "--force-reinstall --no-deps --no-cache-dir lockstep-ddp"
_AGAIN = f"install the package again: pip install {_OPTIONS}"
_DIGEST_BYTES: Final = 32
_ADDRESS, _NUMBER, _WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "lockstep_raise": (_WORD, (_ADDRESS,)),
    "lockstep_read": (_WORD, (_ADDRESS,)),
    "lockstep_wait": (ctypes.c_int, (_ADDRESS, _WORD, _NUMBER, _NUMBER, _ADDRESS)),
    "lockstep_wake": (None, (_ADDRESS,)),
    "lockstep_fence": (None, ()),
    "lockstep_adds": (ctypes.c_int, (_NUMBER,)),
    "lockstep_multiply": (ctypes.c_int, (_ADDRESS, _NUMBER, ctypes.c_double, _NUMBER)),
    "lockstep_sum_blocks": (None, (_ADDRESS, _NUMBER, _ADDRESS, _ADDRESS)),
    "lockstep_run": (ctypes.c_int, (_ADDRESS,)),
    "lockstep_withdraw": (ctypes.c_int, (_ADDRESS,)),
}


def load() -> ctypes.CDLL:
    """Return the library, whose calls release the interpreter lock; ImportError where there is a reason why not."""
    library, reason = _find(_FOLDER)
    if library is None:
        raise ImportError(f"Shared memory cannot be used: {reason}.")
    return library


def why_not() -> str:
    """Return why the library cannot be used, with what to do, as a clause; empty if it can."""
    return _find(_FOLDER)[1]


@functools.cache
def _find(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    path, source = folder / "lockstep.shm.so", folder / "shm.c"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        reason = "the package was installed without a working C compiler"
        return None, f"{reason}; install one, such as gcc, then {_AGAIN}"
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    # The build has appended the digest. A library that was cut off would end the process when it is loaded, and one
    # with a wrong byte might add wrongly.
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return None, f"{path.name} is damaged; {_AGAIN}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} cannot be loaded: {str(error).removeprefix(f'{path}: ')}"
    library.lockstep_shm_source.restype = ctypes.c_char_p
    built_from = library.lockstep_shm_source().decode("ascii")
    if source.exists() and built_from != hashlib.sha256(source.read_bytes()).hexdigest():
        return None, f"{path.name} was compiled from another shm.c; {_AGAIN}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, ""
