# Everything runs through the virtual environment that `make env` sets up; a clone needs only make and python3 >= 3.10.

PYTHON3 ?= python3
VENV ?= .venv
export VENV
PYTHON := $(VENV)/bin/python

# `make test SUITES=unit`, `make test SELECT=slow`, `make test ARGS="-k cancel -x"`
SUITES ?= unit group comfy browser
SELECT ?= not slow
UNIT_WORKERS ?= 2
ARGS ?=
BENCHES ?= wire overhead dispatch load native replicas layouts
# pytest gets the folders that exist.
folders = $(wildcard $(addprefix tests/,$(1)))

.PHONY: env demo serve doctor test test-oldest lint format parity parity-native matrix bench browser faults clean distclean

env:
	@$(PYTHON3) -m tools.environment

demo: env
	@$(PYTHON) -m tools.demo $(WORKFLOW)

serve: env
	@$(PYTHON) -m tools.serve -- $(ARGS)

# Does a group work on this machine? A report for a first run or a bug report. ARGS="--devices 0,1" picks cards.
doctor: env
	@$(PYTHON) -m tools.doctor $(ARGS)

# Unit tests share the cores, a file on each; what starts ranks, servers and browsers needs them all to itself.
# (5 is pytest's word for "nothing selected", which -k in ARGS makes of one of the two.)
test: env
	@if [ -n "$(call folders,$(filter unit,$(SUITES)))" ]; then \
		$(PYTHON) -m pytest $(call folders,$(filter unit,$(SUITES))) -n $(UNIT_WORKERS) --dist loadfile \
			-m "$(SELECT)" $(ARGS) || [ $$? -eq 5 ]; fi
	@if [ -n "$(call folders,$(filter-out unit,$(SUITES)))" ]; then \
		$(PYTHON) -m pytest $(call folders,$(filter-out unit,$(SUITES))) -m "$(SELECT)" $(ARGS) \
			|| [ $$? -eq 5 ]; fi

# The oldest supported versions, in an environment of their own: what needs no ComfyUI server.
OLDEST := torch==2.9.1 torchvision==0.24.1 diffusers==0.42.0 transformers==5.0.0
test-oldest:
	$(MAKE) test VENV=.venv-oldest TORCH_REQUIREMENTS="$(OLDEST)" SUITES="unit group"

# Every accepted layout against one process on the same weights: one line each.
parity: env
	$(PYTHON) -m tests.parity $(ARGS)

# The same, and one forward of every transformer class under the axes that it is open to, whole.
matrix: parity
	$(PYTHON) -m tests.parity --all $(ARGS)

# Every way a group can break, on CPU ranks: one line each. ARGS="--only cancels" for a part, --json for a file.
faults: env
	$(PYTHON) -m tests.faults $(ARGS)

# What people see, also the long stories: on two frontends with two renderers. Fetches what is missing of them, once.
# ARGS="-k 1.58.1-nodes2" for one of the four, ARGS="-k rank_dies" for one story. Pictures: test_output/browser.
browser: env
	@$(PYTHON) -m tools.page_parts
	$(PYTHON) -m pytest $(call folders,browser) $(ARGS)

# Stock MODELs against ComfyUI's own, whole sampling runs: one line each.
parity-native: env
	$(PYTHON) -m tests.parity_native $(ARGS)

bench: env
	@for name in $(BENCHES); do $(PYTHON) -m tests.bench $$name $(ARGS) || exit 1; done

lint: env
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tools.typecheck

format: env
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean:
	rm -rf demo_output test_output .cache/serve .pytest_cache .ruff_cache .mypy_cache build *.egg-info
	find . -path './.venv*' -prune -o -path ./.cache -prune -o -name __pycache__ -exec rm -rf {} +

distclean: clean
	rm -rf .cache $(VENV)
