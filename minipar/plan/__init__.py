"""Choosing a layout: sizes and operations (model.py), machines (machine.py), memory (memory.py), time (time.py), and
the planner that searches (planner.py). Read them in this order; nothing here runs a model.
"""
