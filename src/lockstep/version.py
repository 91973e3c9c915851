"""The version of Lockstep, which the package's metadata is made from."""

from typing import Final

VERSION: Final = "0.1.0"
