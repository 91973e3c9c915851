from lockstep.comm.generations import LostWorker
from lockstep.data import Cursor
from lockstep.engine.present import Continued


def continued(*, world_size: int, repeats_step: bool) -> Continued:
    return Continued(
        generation=1,
        lost=(LostWorker(rank=0, pid=41, reason="killed by SIGKILL"), LostWorker(rank=2, pid=43, reason="gone")),
        world_size=world_size,
        shards=(range(3), range(3, 4))[:world_size],
        cursor=Cursor(1, 4),
        repeats_step=repeats_step,
        seconds=0.05,
    )


def test_one_line_says_who_was_lost_what_is_repeated_and_who_runs_what() -> None:
    assert str(continued(world_size=2, repeats_step=True)) == (
        "Rank 0 (pid 41) killed by SIGKILL; rank 2 (pid 43) gone. 2 workers continue with epoch 2, step 5, which is "
        "repeated, after 0.05 s. Shards: rank 0: 0 to 2, rank 1: 3. No sample is lost, and no bit of the result "
        "changes. (LS604)"
    )


def test_a_loss_between_two_steps_repeats_none() -> None:
    assert "1 worker continues before epoch 2, step 5, after 0.05 s." in str(
        continued(world_size=1, repeats_step=False)
    )
