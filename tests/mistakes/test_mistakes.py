"""Some mistakes, and some scripts without one, on two real processes. `python -m tests.mistakes` runs all of them."""

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.mistakes.judge import LIMIT_SECONDS, Message, Outcome, Report, Verdict, judge
from tests.mistakes.pair import report_of, run_on_pair
from tests.mistakes.script import SAME, Script
from tests.mistakes.scripts import SCRIPTS
from tests.process.ranks import JoinGroup, RankPool

import lockstep as ls


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """Two ranks with a default group of each backend; they are started when they are needed."""
    with ExitStack() as stack:
        yield {
            backend: stack.enter_context(RankPool(2, JoinGroup(backend, ls.init_process_group)))
            for backend in ("shm", "gloo")
        }


def outcome_of(name: str, backend: str) -> Outcome:
    return judge(SCRIPTS[name], run_on_pair(name, backend))


@pytest.mark.parametrize(
    ("name", "backend", "said"),
    [
        ("gradients_of_autograd_grad_are_assigned", "gloo", "these gradients are not averaged"),
        ("gradients_come_from_torch_func", "shm", "these gradients are not averaged"),
        ("averaged_weights_stay_after_evaluation_on_rank_0", "shm", "swapped in"),
        ("seeds_differ_and_init_sync_is_off", "shm", "init_sync=False"),
        ("optimizer_state_is_loaded_on_rank_0", "shm", "state of their optimizers differs.*exp_avg"),
        ("a_plateau_scheduler_reads_the_local_loss", "shm", "ranks 1 and 0 differ: lr is.*the mean over the ranks"),
        ("gradients_are_clipped_on_rank_0_only", "shm", "The gradients with which rank 1 stepped"),
        ("zero_grad_is_called_on_rank_0_only", "shm", r"added to the gradients of an earlier step.*zero_grad\(\)"),
        ("a_batch_without_memory_is_skipped", "shm", ""),
        ("a_batch_without_positives_has_a_constant_loss", "shm", ""),
        ("two_losses_are_backed_in_random_order", "shm", "runs the backward of wrapped model"),
        ("a_gradient_is_not_finite_on_one_rank", "shm", 'LossError: In backward .* was not finite.*nonfinite="skip"'),
        ("optimizers_step_inside_backward", "shm", "An optimizer stepped inside a backward"),
        ("samplers_shuffle_by_unlike_seeds", "shm", "The DistributedSamplers of ranks 1 and 0 differ: seed is 1 and 0"),
        ("every_rank_trains_on_all_data", "shm", "all 2 ranks computed the same gradients.*DistributedSampler"),
        (
            "ranks_accumulate_different_numbers_of_micro_batches",
            "shm",
            r"rank \d trained on \d+ samples in \d+ backwards",
        ),
        ("set_epoch_is_forgotten_with_the_sampler_of_torch", "shm", "its epoch is still 0"),
        ("the_sampler_is_for_four_ranks", "shm", "made for 4 replicas.*2 ranks"),
        ("one_rank_stops_early", "gloo", ""),
        ("one_rank_has_fewer_batches_and_then_averages_a_metric", "shm", ""),
        ("set_epoch_is_forgotten", "shm", ""),
        ("rank_0_alone_averages_the_loss_for_its_log", "shm", ""),
        ("one_rank_unfreezes_the_backbone_earlier", "gloo", ""),
        ("a_layer_is_made_in_the_first_forward", "shm", ""),
        ("gradients_are_compressed_on_one_rank", "shm", ""),
        ("the_head_is_outside_of_the_wrapper", "gloo", ""),
        ("models_are_wrapped_in_the_order_of_a_set", "gloo", ""),
        ("models_of_equal_values_are_wrapped_in_the_order_of_a_set", "shm", ""),
        ("set_epoch_gets_the_same_number_again", "shm", ""),
        ("a_broken_batch_of_a_loader_is_left_out", "gloo", ""),
        ("data_are_in_another_order_on_each_rank", "shm", ""),
        ("a_checkpoint_without_the_prefix_is_loaded_loosely", "shm", ""),
        ("a_lookahead_of_one_rank_moves_the_weights_back", "shm", ""),
        ("lbfgs_decides_by_the_local_loss", "gloo", ""),
    ],
)
def test_every_rank_is_told_of_a_mistake(name: str, backend: str, said: str) -> None:
    outcome = outcome_of(name, backend)
    assert outcome.verdict == Verdict.TOLD, outcome
    assert outcome.seconds < LIMIT_SECONDS
    for report in outcome.reports:
        texts = [f"{message.kind}: {message.text}" for message in report.messages]
        assert not said or any(re.search(said, text, re.DOTALL) for text in texts), outcome


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("the_unwrapped_model_is_trained", "gloo"),
        ("a_method_of_the_module_computes_the_loss", "shm"),
        ("accumulation_with_no_sync", "gloo"),
        ("clipping_and_a_scaler", "shm"),
        ("gradients_are_averaged_by_hand", "gloo"),
        ("an_average_of_weights_on_all_ranks_and_warm_up", "gloo"),
        ("a_generator_and_a_discriminator", "shm"),
        ("synchronized_batch_norm", "shm"),
        ("rank_0_evaluates_alone", "gloo"),
        ("a_critic_with_spectral_norm_is_frozen_for_the_generator", "shm"),
        ("an_encoder_follows_with_momentum_and_a_queue", "gloo"),
        ("freezing_and_unfreezing", "shm"),
        ("uneven_data_within_join", "shm"),
        ("gradient_checkpointing", "shm"),
        ("meta_learning_with_create_graph", "shm"),
        ("packed_tokens_weighted_by_their_number", "shm"),
        ("each_rank_logs_what_it_sees", "shm"),
        ("rank_0_looks_at_the_gradients_of_inputs", "shm"),
        ("epochs_with_sampler_and_evaluation_on_every_rank", "shm"),
        ("two_wrapped_networks_have_one_optimizer_each_and_one_loss", "shm"),
        ("two_samplers_with_two_views_of_each_sample", "shm"),
    ],
)
def test_a_script_is_right_without_a_warning(name: str, backend: str, pools: dict[str, RankPool]) -> None:
    outcome = judge(SCRIPTS[name], pools[backend].run(report_of, name))
    assert outcome.verdict == Verdict.RIGHT, outcome
    assert not any(report.messages for report in outcome.reports)


def report(*texts: str, end: str = "returned", value: float = 1.0, seconds: float = 1.0) -> Report:
    messages = tuple(Message(kind="UserWarning", text=text, seconds=seconds) for text in texts)
    return Report(messages=messages, result=[torch.tensor(value)] if end == "returned" else None, end=end)


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([report(), report()], Verdict.RIGHT),
        ([report(), report(value=2.0)], Verdict.SILENT),
        ([report("the weights differ"), report("the weights differ", value=2.0)], Verdict.TOLD),
        ([report("the weights differ"), report(value=2.0)], Verdict.PARTLY),
        ([report("another thing"), report("another thing", value=2.0)], Verdict.PARTLY),
        ([report("the weights differ", seconds=60.0), report("the weights differ", value=2.0)], Verdict.PARTLY),
        ([report("the weights differ"), report("the weights differ", end="not done")], Verdict.PARTLY),
        ([report(end="not done"), report()], Verdict.HANG),
        ([report(end="exit code -6"), report()], Verdict.PARTLY),
    ],
)
def test_a_mistake_is_judged_by_what_every_rank_reports(reports: list[Report], verdict: Verdict) -> None:
    script = Script(name="", run=lambda _rank, _wrap: None, cause="weights differ", right=SAME)
    assert judge(script, reports).verdict == verdict


def test_a_message_to_a_correct_script_is_a_false_alarm() -> None:
    script = Script(name="", run=lambda _rank, _wrap: None, cause=None, right=SAME)
    assert judge(script, [report(), report("the weights differ")]).verdict == Verdict.FALSE_ALARM
