import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.reduce.status import Note, Notes, num_notes, read_notes, write_note

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
NOTES = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 2_000_000)), min_size=1, max_size=200
)  # 200 flags, and a digit of a rank's own, are exact in bfloat16


@given(said=NOTES, dtype=DTYPES)
def test_what_ranks_say_comes_through_a_sum_in_any_dtype(
    said: list[tuple[bool, bool, int]], dtype: torch.dtype
) -> None:
    total = torch.zeros(num_notes(len(said)), dtype=dtype)
    for rank, (failed, changed, size) in enumerate(said):
        note = Note(has_failed=failed, has_changed=changed, batch_size=size)
        total += torch.tensor(write_note(note, rank, len(said)), dtype=dtype)
    assert read_notes(total.tolist()) == Notes(
        num_failed=sum(failed for failed, _, _ in said),
        num_changed=sum(changed for _, changed, _ in said),
        batch_sizes=tuple(size for _, _, size in said),
    )


def test_batches_are_uneven_where_two_ranks_that_know_theirs_differ() -> None:
    def uneven(*sizes: int) -> tuple[int, ...]:
        return Notes(num_failed=0, num_changed=0, batch_sizes=sizes).uneven_batch_sizes

    assert uneven(4, 4, 4) == ()
    assert uneven(4, 0, 4) == ()
    assert uneven(4, 3, 0) == (4, 3, 0)
