"""Pipelines: schedules as data, checked, simulated, executed. Read actions.py, schedules.py, simulate.py, check.py,
messages.py, then stage.py and executor.py.
"""

from minipar.parallel.pipeline.actions import Action, Schedule, parse_action
from minipar.parallel.pipeline.check import Report, check
from minipar.parallel.pipeline.executor import PipelineExecutor, PipelineStage
from minipar.parallel.pipeline.messages import load_csv, lower, save_csv
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.pipeline.simulate import Durations, Slot, Timeline, peak_live, simulate
from minipar.parallel.pipeline.stage import balanced_cuts, cut, part_costs

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "PipelineExecutor",
    "PipelineStage",
    "Report",
    "Schedule",
    "Slot",
    "Timeline",
    "balanced_cuts",
    "check",
    "cut",
    "load_csv",
    "lower",
    "make",
    "parse_action",
    "part_costs",
    "peak_live",
    "save_csv",
    "simulate",
]
