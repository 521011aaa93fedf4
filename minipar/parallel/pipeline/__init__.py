"""Pipeline parallelism: schedules that are built as data, checked, simulated and executed.

Reading order: actions.py, schedules.py, simulate.py, check.py, then stage.py, which runs a GPT, and module.py, which
runs the user's own stages. (The asynchronous pipelines are chapters/support/pipedream.py.)
"""
