"""Which versions of NCCL are warned of, and where."""

import pytest

from lockstep.comm.nccl_defects import DEFECTS, explain_defects


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.source)
def test_the_version_that_fixes_a_defect_is_not_warned_of_it(defect: object) -> None:
    fixed = getattr(defect, "fixed")  # noqa: B009 - an id makes pytest pass it as an object
    for world_size, is_one_host in ((1, True), (2, True), (2, False)):
        assert getattr(defect, "effect") not in explain_defects(  # noqa: B009
            fixed, world_size=world_size, is_one_host=is_one_host
        )


def test_a_defect_is_named_where_it_can_show() -> None:
    assert "one network card per GPU" in explain_defects((2, 18, 1), world_size=16, is_one_host=False)
    assert explain_defects((2, 18, 1), world_size=8, is_one_host=True) == ""
    assert "ReduceOp.AVG" in explain_defects((2, 27, 5), world_size=1, is_one_host=True)
    assert explain_defects((2, 27, 5), world_size=8, is_one_host=True) == ""


def test_several_defects_are_one_warning_that_names_the_version_without_them() -> None:
    text = explain_defects((2, 12, 5), world_size=8, is_one_host=True)
    assert text.startswith("NCCL 2.12.5 is known to return wrong results: ")
    assert "NVLink" in text
    assert "aligned" in text
    assert "Use NCCL 2.15.5 or later" in text


def test_a_version_without_known_defects_is_not_warned_of() -> None:
    assert explain_defects((2, 29, 7), world_size=1, is_one_host=True) == ""
