"""Pipeline parallelism: schedules that are built as data, checked, simulated and executed.

Reading order: actions.py, schedules.py, check.py, stage.py, and module.py, which
runs the user's stages.
"""
