# Everything starts from Python 3.11 or newer and make. The environment in .venv is made by the first target that needs
# it; each target installs only what it needs, at the versions of constraints.txt, and a stamp file remembers that.
#
#   make demo    PYTHON=/path/to/python3.12    another interpreter (only when .venv is made)
#   make test    PYTEST="-k ring -x"           some tests

# python3 where it is new enough, else the newest of the versioned names that runs.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PYTEST ?=
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Another number of ranks needs another mesh: make demo RANKS=4 MESH="--dp 2 --pp 2"
RANKS ?= 8
MESH ?= --dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel
DEMO := $(MESH) --microbatches 4 --layers 2 --hidden 128 --heads 4 --seq-len 64 --global-batch 32 --lr 2e-3 --dtype float64
STEPS ?= 200

.PHONY: help demo test lint reference notebooks clean

help:
	@echo "make demo       train a GPT on $(RANKS) ranks, prove it equal to one device, draw loss, timeline and mesh"
	@echo "make test       the tests"
	@echo "make reference  the comparisons with torch and transformers (installs torch)"
	@echo "make lint       ruff and mypy"
	@echo "make notebooks  execute the chapters again"
	@echo "make clean      remove what commands wrote; .venv stays"

# The timeline is of three more steps, on the clock that shows what as many cores as ranks would do, with a network of
# 20 us per message and 1 GB/s.
demo: $(VENV)/.base
	@mkdir -p out
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m minipar.train $(DEMO) --steps $(STEPS) --warmup-steps 20 \
	    --lr-schedule cosine --metrics out/demo.jsonl --verify
	@$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m minipar.train $(DEMO) --steps 3 --trace out/demo_trace.json \
	    --clock cpu --network 20e-6 1e-9 > out/demo_trace.log
	@$(BIN)/python -m visualize loss out/demo.jsonl --reference 5.545 --reference-label 'a uniform guess, ln 256:' --out out/demo_loss.png
	@$(BIN)/python -m visualize trace out/demo_trace.json --out out/demo_timeline.png
	@$(BIN)/python -m visualize mesh out/demo_trace.json --out out/demo_mesh.png
	@echo "proved: see the line above. Drawn: out/demo_loss.png, out/demo_timeline.png, out/demo_mesh.png (trace: out/demo_trace.json)"

# Two files at a time: most tests are one process that computes or waits. A file's tests share what they have computed.
test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

reference: $(VENV)/.reference
	$(BIN)/python -m pytest tests/reference $(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# nbmake fails on a cell that failed on an engine, where nbclient alone does not notice.
notebooks: $(VENV)/.test
	$(BIN)/jupytext --quiet --to ipynb --update chapters/[0-9]*.py
	$(BIN)/python -m pytest --nbmake --overwrite --nbmake-timeout=600 chapters/*.ipynb

clean:
	rm -rf out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------

$(VENV)/pyvenv.cfg:
	@[ -n "$(PYTHON)" ] || { echo "minipar needs Python 3.11 or newer; found none. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"minipar needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}")'
	@echo "creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "minipar: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.base: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar: numpy, mpi4py, mpich, matplotlib, safetensors"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar for its tests and notebooks: pytest, Jupyter, CuPy (to check names; no GPU needed)"
	@$(INSTALL) --editable '.[test,notebook]'
	@touch $@ $(VENV)/.base

$(VENV)/.dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing ruff, mypy, pre-commit"
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.base

# torch by its exact version, first and alone: a request by range can make pip fetch several GB of other builds.
$(VENV)/.reference: $(VENV)/.test
	@echo "installing torch and transformers, to compare with"
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@$(INSTALL) --editable '.[test,reference]'
	@touch $@
