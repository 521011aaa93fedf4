"""Measurements: `mpirun -n N python -m minipar.bench collectives --json FILE`."""
