"""Which tests and parameters are slow, which files begin first, what was imported to collect them, what the
garbage collector skips, how many examples hypothesis draws, what HTTP clients share, and the loop on which an
async test runs.

Its presence lets the tests import the helpers that stand beside it.
"""

import asyncio
import gc
import inspect
import ssl
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from helpers.processes import DEADLINE_S
from helpers.small_run import write_small_run
from tailrace import clock

TESTS = Path(__file__).parent
SLOW = (
    "benchmarks/",
    "controller/test_budget.py::test_what_a_kill_undid_was_paid_for",
    "drivers/commands/test_failing_runs.py",
    "drivers/commands/test_pinned_live.py",
    "drivers/commands/test_restarts.py",
    "drivers/commands/test_signals.py",
    "drivers/commands/test_slow_rewards.py",
    "drivers/data/test_procedural.py::test_a_prompt_is_the_same_in_another_process",
    "drivers/data/test_procedural.py::test_both_splits_have_the_same_distribution_of_lengths",
    "drivers/data/test_tokenizer.py::test_torch_is_not_imported_for_the_data",
    "drivers/engine/native/test_native_steps.py::test_in_bfloat16_a_late_read_changes_no_token_of",
    "drivers/trainer/test_fsdp.py",
    "drivers/trainer/test_trainer.py::test_the_effective_sample_size_is_one_on_policy",
    "drivers/weights/test_filesystem.py::test_a_trainer_killed_while_it_writes_leaves_no_version",
    "drivers/weights/test_shared_memory.py::test_what_a_killed_run_left_is_removed",
    "drivers/workers/test_hosts.py::test_ray_is_not_imported_by_a_run_on_this_host",
    "drivers/workers/test_resident_memory.py",
    "drivers/workers/test_trainer_group.py",
    "drivers/workers/test_transports.py",
    "extras/agents/test_agent_training.py::test_an_agent_whose_turns_are_cut_trains_on",
    "extras/agents/test_agents.py::test_what_a_program_has_started_ends_when_the_controller_is_killed",
    "extras/diagnose/test_diagnose.py",
    "extras/http/test_http_generations.py",
    "extras/plan/test_costs.py::test_a_live_run_ends_when_its_budget_is_spent",
    "extras/plan/test_costs.py::test_the_planner_prints_costs_beside_times",
    "extras/plan/test_peers.py::test_lengths_without_a_dump_have_the_mean",
    "extras/plan/test_peers.py::test_trl_logs_the_same_to_its_state_and_to_wandb",
    "extras/plan/test_plan.py::test_the_written_config_runs_in_virtual_time",
    "extras/plan/test_plan_from_a_run.py",
    "extras/plan/test_planned.py::test_a_planned_run_passes_a_dry_run_on_a_machine_without_the_cluster",
    "extras/plan/test_profile_command.py::test_the_engine_of_a_config_is_measured",
    "extras/plan/test_search.py",
    "extras/serve/test_control.py::test_a_trainer_without_this_package_makes_the_group_and_sends_weights",
    "extras/serve/test_generate_route.py::test_256_streams_at_once_get_all_their_tokens",
    "extras/serve/test_served_contract.py",
    "extras/sft/test_sft.py::test_the_model_ends_its_texts_with_what_it_was_taught",
    "extras/trackers/test_trackers.py::test_wandb_stores_every_figure_and_the_samples_that_it_may_have_offline",
    "reproductions/",
    "schedules/test_every_schedule.py::test_the_same_seed_gives_the_same_bytes_of_the_run_log",
    "schedules/test_masked.py::test_groups_whose_tokens_are_all_masked_are_data",
    "schedules/test_pipelinerl.py::test_a_full_ring_blocks_the_engines_or_drops",
    "schedules/test_pipelinerl.py::test_slow_rewards_neither_pile_samples_up_nor_make_tokens_older",
    "test_model_folder.py::test_a_model_that_the_hub_does_not_give_is_refused_with_the_other_ways",
)
"""Folders, files and tests that `make test` leaves to `make test-slow`: scripts beside the package, whole
runs with workers that fail, transfers, many ranks, the memory of processes, all candidates of the planner."""
SCHEDULES = (
    *("serial", "rolloutpipe_frontier", "april", "tailbatch_dapo", "rollpacker", "pipelinerl_hold"),
    *("laminar", "trl_async", "tailrace_masked"),
)
"""One of each way to generate: a barrier, a frontier, parking, a race, a ring, pinned versions, a mask."""
EVERY = (
    "controller/test_interruption.py::test_an_interrupted_run_saves_every_step",
    "controller/test_run.py::test_a_run_killed_at_any_moment_and_resumed_trains",
    "drivers/commands/test_simulate.py::test_the_cluster_runs_every_schedule",
    "record/test_bounds.py::test_no_schedule_falls_below_its_bounds",
    "rollout/test_members.py::test_the_rules_hold_under_every_schedule",
    "rollout/test_reference_stage.py",
    "schedules/test_engines_that_die.py::test_engines_killed_at_random_moments",
    "schedules/test_errors_of_callbacks.py",
    "schedules/test_every_schedule.py",
    "schedules/test_held_out.py",
)
"""Tests of every schedule: `make test` takes SCHEDULES, `make test-slow` all others."""
FEW = {
    "drivers/commands/test_readers.py::test_a_damaged_folder_is_shown": ("events.jsonl", "config.toml"),
    "drivers/assembly/test_trainer_memory.py::test_the_activations_that_autograd_keeps": ("qwen3",),
    "drivers/engine/native/test_any_model.py::test_log_probs_equal_transformers": ("llama", "mamba2", "gpt2"),
    "drivers/engine/native/test_native_adapters.py::test_an_adapter_is_added_to_the_layers": ("qwen3",),
    "drivers/engine/native/test_native_cache.py::test_at_no_moment_does_the_cache_hold_more": ("1000",),
    "drivers/engine/native/test_native_logprobs.py::test_short_and_long_in_one_batch": ("qwen3",),
    "drivers/engine/native/test_native_reference.py": ("True",),
    "drivers/engine/native/test_native_weights.py::test_matrices_in_the_layout_for_few_rows": ("qwen3",),
    "drivers/engine/test_proof.py": ("an older adapter", "a dropped tensor"),
    "drivers/trainer/test_architectures.py::test_an_architecture_is_exact_in_both_samples": (
        *("llama", "qwen3", "gemma3_text", "gpt2", "mamba2", "qwen3_moe"),
    ),
    "drivers/trainer/test_architectures.py::test_gradients_are_those_of_transformers": ("gemma2", "lfm2"),
    "drivers/trainer/test_checkpoint.py::test_a_checkpoint_has_the_state_at_its_beginning": ("{}",),
    "drivers/trainer/test_checkpoint.py::test_a_damaged_checkpoint_names_itself": ("missing",),
    "drivers/trainer/test_checkpoint.py::test_weights_that_predict_several_tokens": ("llama",),
    "drivers/trainer/test_lora.py::test_names_in_files_may_lack_the_prefix": ("llama",),
    "drivers/trainer/test_lora.py::test_the_merged_export_is_peft_s_sum": ("gpt2",),
    "drivers/trainer/test_offload.py::test_training_with_sleep_between_all_calls": ("all weights",),
    "drivers/trainer/test_token_losses.py::test_the_gradient_of_each_loss": ("ppo", "cross_entropy"),
    "drivers/trainer/test_trainer.py::test_another_order_or_packing": ("token_mean",),
    "drivers/trainer/test_trainer.py::test_streamed_accumulation_equals": ("token_mean",),
    "drivers/trainer/test_trainer.py::test_the_step_divides_by_what_it_trained": ("token_mean",),
    "drivers/trainer/test_trl_equality.py::test_loss_and_gradients_equal_those_trl_gave": ("1000",),
    "examples/test_presets.py::test_an_example_passes_a_dry_run_without_its_gpus": ("gsm8k",),
    "extras/http/test_server_engines.py::test_a_started_server_gets_the_context": ("sglang",),
    "extras/http/test_vllm_adapter.py::test_each_request_has_one_adapter": ("vllm-0.33",),
    "extras/init/test_init.py::test_each_preset_passes_a_dry_run": ("RTX 4090",),
    "extras/init/test_init.py::test_the_planner_finds_each_preset_within_its_limits": ("1xRTX 4090",),
    "extras/plan/test_plan.py::test_a_signal_ends_the_search": ("15",),
    "extras/serve/test_control.py::test_the_cache_is_kept_or_recomputed": ("keep",),
    "extras/serve/test_listening.py::test_a_flood_of_strangers": ("b''",),
    "extras/serve/test_self_test.py::test_a_server_with_other_weights_is_refused": ("float32", "smollm2"),
    "extras/serve/test_self_test.py::test_log_probs": ("float32", "smollm2"),
    "extras/sft/test_sft.py::test_a_resumed_run_notices_changed_inputs": ("rows.jsonl",),
    "rollout/test_members.py::test_the_bias_of_a_deadline": ("0",),
    "schedules/test_engines_that_die.py::test_a_pinned_sample_has_tokens_of_its_version_alone": (
        "trl_async",
    ),
    "schedules/test_masked.py::test_masked_tokens_are_accounted_for_after_a_kill": ("tailrace_masked",),
    "schedules/test_pipelinerl.py::test_no_token_is_older_than_the_rings_imply": ("12",),
}
"""Parameters that `make test` gives these tests; `make test-slow` gives the others."""
LONG = (
    "ledger/test_books_close.py",
    "drivers/commands/test_train.py",
    "drivers/workers/test_transports.py",
    "drivers/workers/test_process.py",
    "schedules/test_every_schedule.py",
    "drivers/trainer/test_trainer.py",
    "controller/test_run.py",
    "drivers/engine/native/test_any_model.py",
    "controller/test_interruption.py",
    "extras/plan/test_search.py",
    "extras/serve/test_served_contract.py",
    "drivers/workers/test_trainer_group.py",
    "extras/hub/test_push.py",
    "extras/http/test_http_generations.py",
    "drivers/kinds/test_teacher.py",
    "drivers/workers/test_resident_memory.py",
    "drivers/commands/test_signals.py",
    "extras/plan/test_plan_from_a_run.py",
    "drivers/workers/test_engine.py",
    "drivers/trainer/test_fsdp.py",
    "drivers/trainer/test_algorithms.py",
    "drivers/commands/test_failing_runs.py",
    "extras/diagnose/test_diagnose.py",
    "rollout/test_members.py",
)
"""Files that begin first, the longest at the front: pytest-xdist gives whole files to its processes, and one
that began last would leave the other core idle."""

with suppress(ModuleNotFoundError):  # `make release-check` has pytest alone
    from hypothesis import settings

    settings.register_profile("few", max_examples=60)
    settings.load_profile("few")


ELSEWHERE = {"ray", "slurm", "launch", "verifiers", "environments", "tinker", "peers", "vllm", "playground"}
IMPORTED = pytest.StashKey[frozenset[str]]()


def pytest_configure() -> None:
    ssl.create_default_context = cache(ssl.create_default_context)  # an HTTP client reads 140 certificates


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED] = frozenset(sys.modules)
    gc.freeze()  # the modules and the tests live to the end: each full collection would visit them again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {path: path.relative_to(TESTS).as_posix() for path in {item.path for item in items}}
    for item in items:
        if is_slow(f"{names[item.path]}::{item.name}", item):
            item.add_marker(pytest.mark.slow)
        if ELSEWHERE & {marker.name for marker in item.iter_markers()}:
            item.add_marker(pytest.mark.elsewhere)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(names[item.path], len(LONG)))


def is_slow(name: str, item: pytest.Item) -> bool:
    """Whether a table above leaves a test to `make test-slow`."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if name.startswith(EVERY) and given.get("name", SCHEDULES[0]) not in SCHEDULES:
        return True
    few = next((values for prefix, values in FEW.items() if name.startswith(prefix)), ())
    return name.startswith(SLOW) or bool(few and given and not {*map(str, given.values())} & {*few})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run an async test on a loop of its own: in virtual time if it has the mark, else live."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return
    virtual = pyfuncitem.get_closest_marker("virtual") is not None

    async def within_deadline(**given: object) -> None:
        async with asyncio.timeout(None if virtual else DEADLINE_S):
            await test(**given)

    pyfuncitem.obj = lambda **given: clock.run(within_deadline(**given), virtual=virtual)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The config of a run small enough for a test."""
    return write_small_run(tmp_path)


@pytest.fixture
def imported(pytestconfig: pytest.Config) -> frozenset[str]:
    """The modules that the collection of the tests has imported."""
    return pytestconfig.stash[IMPORTED]
