# Two commands: `make demo` and `make test`. Both set everything up first, on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Compiled kernels stay in the clone, so that only the first run waits for them.
export NUMBA_CACHE_DIR ?= $(CURDIR)/.numba

.PHONY: venv browser compile kernels test test-quick test-long test-frameworks lint docs tables demo readme dist format clean

venv: $(VENV)/.installed

# torch goes first and pinned: an open range asked for by another package would pull a build with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	@begun=$$(date +%s); set -ex; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	$(PIP) torch==2.13.0; \
	$(PIP) --editable '.[test,lint]'; \
	touch $@; \
	$(BIN)/thinwire compile; \
	set +x; echo "set-up: $$(($$(date +%s) - begun)) s, once per clone"

# Report pages are tested in a browser. Where none can be had, those tests are skipped and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -qq -y chromium >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -qq -y chromium; } >/dev/null 2>&1 || true; \
	fi

# After an edit of a kernel, too; otherwise there is nothing to do.
compile: venv
	@$(BIN)/thinwire compile

kernels: compile
	@$(BIN)/python -m tests.kernels.compile

# Everything that protects a user. What cannot be run here (no browser, no namespaces) is skipped and says so.
test: venv browser kernels
	@$(BIN)/python -m tests.run

# While working: the unit tests that take no time.
test-quick: venv kernels
	@$(BIN)/python -m tests.run quick

# What `make test` leaves out, and nothing else: properties with many examples, long storms of hostile input, kills, a soak.
test-long: venv kernels
	@$(BIN)/python -m tests.run long

# Accelerate, Lightning and transformers are 200 MB and a minute to install, so `make test` does without: their tests are skipped.
test-frameworks: venv
	$(PIP) --editable '.[frameworks]'
	$(BIN)/python -m pytest tests/integrations tests/docs

lint: venv
	$(BIN)/ruff check src tests examples tools
	$(BIN)/ruff format --check src tests examples tools
	$(BIN)/mypy

# Pages into build/site. Every warning is an error: a link or an anchor that leads nowhere, a page outside the navigation.
docs: venv
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every table of numbers in README.md and docs/, and the picture of README.md, from results/*.json.
tables: venv
	$(BIN)/python tools/tables.py
	$(BIN)/python tools/picture.py

demo: venv compile
	$(BIN)/thinwire demo

# The first numbers and the picture of README.md, measured anew. The machine should do nothing else meanwhile.
readme: venv compile
	$(BIN)/thinwire demo --json results/demo.json
	@$(MAKE) --no-print-directory tables

# The wheel and the sdist, and whether the wheel works where there is nothing else: in an environment and a folder of its own.
dist: venv
	$(PIP) --editable '.[dist]'
	rm -rf dist build/installed
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	build/installed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	mkdir -p build/elsewhere
	cd build/elsewhere && env -u PYTHONPATH ../installed/bin/python -c "import thinwire; print('installed:', thinwire.__file__, thinwire.__version__)"
	cd build/elsewhere && env -u PYTHONPATH ../installed/bin/thinwire doctor

format: venv
	$(BIN)/ruff check --fix src tests examples tools
	$(BIN)/ruff format src tests examples tools

clean:
	rm -rf $(VENV) .numba build dist
