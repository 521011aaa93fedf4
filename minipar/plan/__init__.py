"""Choosing a layout. Read model.py (sizes and operations), machine.py and program.py (what a model runs on, and how),
memory.py and communication.py (what a layout holds and sends); then what a step takes: compute.py, parts.py and
stages.py, pipeline.py and overlap.py, time.py; then planner.py, which searches. Nothing here runs a model.
"""
