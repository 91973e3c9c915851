"""Whether named tensors fit a model, and one message that says all that does not. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]

_SHOWN = 8
_COMPARED = 2000
"""Above this many names no near ones are looked for: it would take longer than reading them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What `load_weights` read, and what of it did not fit."""

    recognised: str
    """What the file is and what was done to its names, in words."""
    missing: tuple[str, ...] = ()
    """Names of the model that the file has not; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """Names of the file that the model has not."""
    misshaped: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Names with other shapes, with that in the file and that in the model; they keep their values."""
    clashing: tuple[tuple[str, str], ...] = ()
    """Pairs of names that are one tensor in the model and have different values in the file."""

    @property
    def fits(self) -> bool:
        """Whether the file and the model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.misshaped or self.clashing)


def find_shape_mismatches(
    found: Mapping[str, Shape], expected: Mapping[str, Shape | None]
) -> dict[str, tuple[Shape, Shape]]:
    """Return the names whose shapes differ.

    Args:
        found: Shapes in the file.
        expected: Shapes in the model; None where a lazy module takes whatever comes.
    """
    return {
        name: (shape, wanted)
        for name, shape in found.items()
        if (wanted := expected.get(name)) is not None and not _is_same_shape(shape, wanted)
    }


def describe_misfit(loaded: LoadedWeights, source: str, hint: str, *, can_load_rest: bool) -> str:
    """Return one message with everything that does not fit.

    Args:
        loaded: What does not fit.
        source: The file's name.
        hint: A sentence on what may help, or nothing.
        can_load_rest: Whether there is anything that fits.
    """
    lines = [f"{source} does not fit the model ({loaded.recognised})."]
    if loaded.missing:
        lines.append(f"{len(loaded.missing)} missing in the file: {_listed(loaded.missing)}")
    if loaded.unexpected:
        near = [_with_similar_name(name, loaded.missing) for name in loaded.unexpected[:_SHOWN]]
        lines.append(f"{len(loaded.unexpected)} not in the model: {_listed(near, len(loaded.unexpected))}")
    if loaded.misshaped:
        shapes = [
            f"size mismatch for {name}: {list(found)} in the file, {list(wanted)} in the model"
            for name, (found, wanted) in loaded.misshaped.items()
        ]
        lines.append(f"{len(shapes)} of another shape: {_listed(shapes, separator='; ')}")
    if loaded.clashing:
        pairs = [f"{first} and {second}" for first, second in loaded.clashing]
        lines.append(f"{len(pairs)} are one tensor in the model and differ in the file: {_listed(pairs)}")
    advice = "Build the model as it was when the file was written"
    advice += ", or load what fits with strict=False." if can_load_rest else "."
    return "\n  ".join([*lines, f"{hint} {advice}".strip()])


def _is_same_shape(found: Shape, wanted: Shape) -> bool:
    """Compare shapes as torch does: a scalar may have been written as a vector of one (before torch 0.4)."""
    return found == wanted or (found == (1,) and wanted == ())


def _with_similar_name(name: str, candidates: Sequence[str]) -> str:
    near = [other for other in candidates if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")][:1]
    if not near and len(candidates) <= _COMPARED:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
    return f"{name} (near {near[0]})" if near else name


def _listed(items: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    more = (len(items) if count is None else count) - _SHOWN
    return separator.join(items[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
