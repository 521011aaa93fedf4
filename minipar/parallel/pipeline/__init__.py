"""Pipeline parallelism: schedules that are built as data, checked, simulated and executed.

Reading order: actions.py, schedules.py, simulate.py, check.py, then stage.py, which runs a GPT, and module.py, which
runs the user's own stages. (The asynchronous pipelines are chapters/support/pipedream.py.)
"""

from minipar.parallel.pipeline.actions import Action, Schedule, parse_action
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedules import SCHEDULES, load_csv, make, save_csv
from minipar.parallel.pipeline.simulate import Durations, Slot, Timeline, peak_live, simulate
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineStage, balanced_cuts, cut, part_costs

__all__ = [
    "SCHEDULES", "Action", "Durations", "PipelineExecutor", "PipelineStage", "Schedule", "Slot", "Timeline",
    "balanced_cuts", "check", "cut", "load_csv", "lower", "make", "parse_action", "part_costs", "peak_live", "save_csv",
    "simulate",
]  # fmt: skip
