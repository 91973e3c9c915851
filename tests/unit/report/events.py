"""Events of a run with two epochs of two steps."""

from lockstep.events import RunStarted, StepFinished

STARTED = RunStarted(
    world_size=2,
    device="cpu",
    num_shards=4,
    num_parameters=1234,
    num_train_samples=500,
    num_test_samples=100,
    first_epoch=0,
    num_epochs=2,
    num_steps=2,
)


def step(number: int, loss: float = 0.5) -> StepFinished:
    epoch, place = divmod(number - 1, 2)
    return StepFinished(epoch=epoch, step=place, global_step=number, loss=loss, weight=2.0)
