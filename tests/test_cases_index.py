"""Which tests hold the behavioural cases from public bug reports, and which later work the others wait for.

A case is one example of a kind; its tests are named after its number, but for those that hold more than the case.
"""

import ast
import re
from functools import cache
from pathlib import Path

NUMBERS = """
1 2 3 4 5 6 8 9 10 11 13 14 15 17 18 19 21 22 23 24 26 27 28 29 31 32 33 34
35 37 39 40 42 43 44 45 46 48 50 51 52 53 55 56 57 58 60 61 62 64 65 67 68 69 70
"""
"""The cases of the list; numbers left out there are no cases."""
LATER = {"draft heads", "trees"}
"""Work that no release has: Medusa and EAGLE heads, and windows that branch."""
CASES = {
    1: ("test_case_01_coin_and_residual_are_independent", "test_case_01_02_03_every_position_follows_the_target"),
    2: ("test_case_01_02_03_every_position_follows_the_target", "test_case_02_no_key_is_used_twice"),
    3: (
        "test_case_01_02_03_every_position_follows_the_target",
        "test_case_03_equal_laws_are_accepted",
        "test_case_03_an_empty_residual_is_the_target",
    ),
    4: (
        "test_case_04_filtered_draft",
        "test_case_04_transforms_act_on_draft_and_target_alike",
        "test_case_04_model_drafts_have_the_law_they_report",
        "test_case_04_early_exit_drafts_have_the_law_they_report",
        "test_case_04_early_exit_keeps_the_targets_law",
        "draft heads",
    ),
    5: ("test_case_05_a_greedy_draft_is_a_point_mass",),
    6: ("test_case_06_a_self_drafter_is_always_accepted",),
    8: ("test_case_08_every_branch_has_the_same_filtered_law",),
    9: (
        "test_case_09_greedy_and_sampling_rows_share_a_batch",
        "test_case_09_greedy_rows_do_not_notice_a_missing_neighbour",
    ),
    10: ("test_case_10_penalties_count_inside_the_window", "test_case_10_the_text_of_the_report"),
    11: ("test_case_11_a_rejection_at_any_place_skips_no_token",),
    13: ("test_case_13_ties_are_cut_alike_everywhere", "test_case_13_the_drafter_keeps_the_same_set"),
    14: ("test_case_14_an_accepted_eos_ends_the_row", "test_case_14_other_rows_go_on_after_it"),
    15: (
        "test_case_15_a_scripted_oracle_stays_within_the_budget",
        "test_case_15_prompt_lookup_stays_within_the_budget",
        "test_case_15_the_smallest_outputs_have_columns_for_no_more",
    ),
    17: (
        "test_case_17_stop_string_inside_a_window_of_any_size",
        "test_case_17_stop_string_split_over_two_windows",
        "test_case_17_stop_string_that_begins_in_the_prompt_does_not_match",
        "test_case_17_stop_strings_cut_ids_log_probs_and_counts_alike",
    ),
    18: (
        "test_case_18_drafting_up_to_the_end_of_the_cache",
        "test_case_18_a_text_beyond_the_models_positions_is_refused",
    ),
    19: (
        "test_case_19_a_draft_model_of_shorter_context_goes_on_beyond_it",
        "test_case_19_rotations_beyond_the_context_differ",
    ),
    21: (
        "test_case_21_min_tokens_holds_eos_back_exactly_so_long",
        "test_case_21_min_tokens_beyond_max_tokens_is_refused",
        "test_case_21_min_tokens_as_large_as_max_tokens_ends_by_length",
    ),
    22: ("test_case_22_an_empty_draft_leaves_no_trace", "test_case_22_nothing_is_drafted_where_nothing_matched"),
    23: (
        "test_case_23_a_row_emits_its_own_range_only",
        "test_case_23_a_row_alone_is_the_row_in_the_batch",
        "test_case_23_permuted_rows_are_permuted_outputs",
    ),
    24: ("test_case_24_every_proposal_is_that_of_a_fresh_drafter",),
    26: (
        "test_case_26_filler_behind_the_draft_has_no_effect",
        "test_case_26_filler_inside_the_draft_is_never_accepted",
        "test_case_26_laws_behind_the_draft_have_no_effect",
        "test_case_26_ended_and_padding_rows_are_frozen_for_sixty_steps",
        "test_case_26_fillers_have_no_effect_on_a_mesh",
    ),
    27: ("test_case_27_padding_moves_no_position_and_enters_no_count", "test_n_grams_before_a_module"),
    28: ("test_case_28_both_caches_follow_every_acceptance", "test_case_28_a_self_drafter_is_right_for_200_tokens"),
    29: ("test_case_29_blocks_cross_the_window_at_every_offset",),
    31: ("test_case_31_early_exit_shares_the_cache_and_leaves_it_alone",),
    32: ("draft heads",),
    33: ("test_case_33_a_reused_state_drafts_like_a_cold_one",),
    34: ("test_case_34_rows_end_at_every_edge_of_the_buffer",),
    35: ("draft heads",),
    37: (
        "test_case_37_a_row_draws_the_same_in_any_company",
        "test_case_37_a_batch_of_one_draws_the_same",
        "test_case_37_rows_of_one_prompt_have_noise_of_their_own",
    ),
    39: (
        "test_case_39_stopped_and_resumed_runs_are_the_uninterrupted_one",
        "test_case_39_plain_and_speculative_runs_resume_each_other",
        "test_case_39_a_resumed_run_has_fresh_noise",
        "test_case_39_no_two_draws_share_a_key",
    ),
    40: ("test_case_40_vocabularies_of_unequal_width",),
    42: ("draft heads",),
    43: (
        "test_case_43_equal_content_in_another_layout",
        "test_case_43_first_differing_piece_is_named",
        "test_case_43_one_differing_piece_at_equal_size",
        "test_case_43_differing_eos",
        "test_case_43_padding_may_differ",
        "test_case_43_vocabulary_mismatch_is_refused_unless_allowed",
    ),
    44: ("trees",),
    45: ("trees",),
    46: ("trees",),
    48: (
        "test_case_48_broken_rows_are_flagged_and_the_others_go_on",
        "test_case_48_healthy_rows_are_the_same_beside_healthy_ones",
        "test_case_48_a_drafter_whose_law_breaks_stands_down",
        "test_case_48_a_rejected_nan_leaves_nothing_behind",
        "test_case_48_a_nan_in_the_text_flags_its_row_alone",
    ),
    50: (
        "test_case_50_the_lowest_id_wins_everywhere",
        "test_case_50_the_drafter_breaks_ties_like_the_target",
        "test_case_50_without_speculation",
        "test_case_50_the_lowest_id_wins_across_shards",
    ),
    51: (
        "test_case_51_float32_tokens_do_not_depend_on_the_window",
        "test_case_51_bfloat16_tokens_are_near_ties_at_worst",
    ),
    52: (
        "test_case_52_paired_rows_of_llama_files_are_put_back",
        "test_case_52_query_and_key_biases_are_paired_too",
        "test_case_52_qwen2_files_are_not_paired",
        "test_case_52_quantised_rows_are_put_back_without_mixing_blocks",
    ),
    53: (
        "test_case_53_llama3_scaling_is_the_same_from_the_config_and_from_rope_freqs",
        "test_case_53_linear_scaling_is_read_from_metadata",
        "test_case_53_yarn_scaling_is_read_from_metadata",
        "test_case_53_unknown_scaling_is_an_error",
        "test_case_53_llama3_frequencies",
        "test_case_53_unknown_scaling_is_refused",
        "draft heads",
    ),
    55: ("test_case_55_both_places_for_rope_theta_mean_the_same", "draft heads", "trees"),
    56: (
        "test_case_56_taps_are_named_by_the_layers_passed",
        "test_case_56_taps_out_of_range_are_refused",
        "draft heads",
    ),
    57: ("test_case_57_window_equals_a_masked_reference", "test_case_57_token_0_is_seen_as_far_as_the_window_reaches"),
    58: ("test_case_58_logits_are_those_of_one_device", "test_text_is_that_of_one_device"),
    60: ("test_case_60_two_processes_agree_on_tied_logits",),
    61: (
        "test_case_61_one_launch_whatever_the_length",
        "test_case_61_the_program_never_calls_the_host",
        "test_case_61_generate_reads_nothing_back",
        "test_case_61_a_stream_reads_only_the_finish_flags",
    ),
    62: (
        "test_case_62_nothing_recompiles",
        "test_case_62_one_program_for_each_bucket",
        "test_case_62_nothing_is_compiled_for_lengths_in_a_bucket_or_few_rows",
        "test_case_62_nothing_recompiles_on_a_mesh",
        "test_case_62_slots_on_a_mesh_compile_nothing_later",
    ),
    64: ("test_case_64_nothing_counts_after_the_first_rejection", "test_case_64_rates_of_perfect_and_hopeless_drafts"),
    65: (
        "test_case_65_tokens_after_a_stop_count_nowhere",
        "test_case_65_a_length_limit_inside_the_window",
        "test_case_65_finished_rows_add_to_no_counter",
        "test_case_65_counting_alone",
        "test_case_65_what_is_measured_is_the_output",
    ),
    67: (
        "test_case_67_what_the_clock_sees",
        "test_case_67_phases_wait_for_the_device",
        "test_case_67_latency_is_per_token_and_steps_are_named_apart",
        "test_case_67_first_arrival_may_hold_several_tokens",
    ),
    68: (
        "test_case_68_each_row_goes_at_its_own_pace",
        "test_case_68_a_fast_row_gives_its_slot_away_while_a_slow_one_goes_on",
    ),
    69: (
        "test_case_69_drafters_run_with_their_defaults",
        "test_case_69_every_option_changes_what_is_asked_for",
        "test_case_69_every_benchmark_option_changes_the_plan",
        "test_case_69_options_of_generate_reach_every_point",
        "test_what_does_not_go_together_is_refused_by_name",
        "trees",
    ),
    70: (
        "test_case_70_a_changed_setting_is_refused_by_name",
        "test_case_70_a_job_that_is_whole_stays_as_it_is",
        "test_case_70_a_row_of_another_prompt_is_not_taken_for_the_old_one",
        "test_case_70_cut_anywhere_and_resumed",
        "test_case_70_rows_may_be_inserted_if_they_have_ids",
        "test_case_70_thirty_kills_change_nothing",
    ),
}
"""The tests of each case, and the work that what is left of it waits for."""


@cache
def functions_here() -> list[str]:
    """Every test function of the suite."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.rglob("test_*.py")]
    functions = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


def test_every_case_is_held_or_waits():
    assert list(CASES) == [int(number) for number in NUMBERS.split()]
    assert all(CASES.values())


def test_every_name_is_a_test_or_later_work():
    assert {name for names in CASES.values() for name in names} <= {*functions_here(), *LATER}


def test_every_test_named_after_a_case_is_listed():
    named = {
        (int(number), name)
        for name in functions_here()
        if (numbers := re.match(r"test_case((_\d\d)+)_", name))
        for number in numbers[1].split("_")[1:]
    }
    assert named <= {(number, name) for number, names in CASES.items() for name in names}
