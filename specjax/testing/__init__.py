"""The proof of losslessness as a kit, for what ships and for verifiers and drafters of a user's own.

`check_verifier` and `check_drafter` put a strategy to the checks that apply to it; `python -m specjax.testing` runs the
whole kit on what ships. The pieces are public too: exact enumeration, the G-test, and models with known laws.
"""

from specjax.report.goodness_of_fit import SIGNIFICANCE, combined, g_test, places, uniformity
from specjax.testing.enumeration import CoinRule, Exact, Window, exact, fixed_windows, sampled_window, shared_noise
from specjax.testing.kit import check_drafter, check_verifier, run_checks, run_mutations
from specjax.testing.laws import closed_form, context_free, continuation, reader, text_law
from specjax.testing.models import (
    ContraryDrafter,
    HistoryModel,
    OracleDrafter,
    Script,
    ScriptedDrafter,
    SelfDrafter,
    TableDrafter,
    TableModel,
    history_params,
    script_of,
)
from specjax.testing.mutations import MUTATIONS, Mutation
from specjax.testing.report import Caught, Finding, Measure
from specjax.testing.rows import EachRow, Limited, limited_params

__all__ = [
    "MUTATIONS",
    "SIGNIFICANCE",
    "Caught",
    "CoinRule",
    "ContraryDrafter",
    "EachRow",
    "Exact",
    "Finding",
    "HistoryModel",
    "Limited",
    "Measure",
    "Mutation",
    "OracleDrafter",
    "Script",
    "ScriptedDrafter",
    "SelfDrafter",
    "TableDrafter",
    "TableModel",
    "Window",
    "check_drafter",
    "check_verifier",
    "closed_form",
    "combined",
    "context_free",
    "continuation",
    "exact",
    "fixed_windows",
    "g_test",
    "history_params",
    "limited_params",
    "places",
    "reader",
    "run_checks",
    "run_mutations",
    "sampled_window",
    "script_of",
    "shared_noise",
    "text_law",
    "uniformity",
]
