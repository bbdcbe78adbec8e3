# Two commands: `make demo` and `make test`. Both set everything up first, on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: venv browser test test-frameworks lint docs demo format clean

venv: $(VENV)/.installed

# torch goes first and pinned: an open range asked for by another package would pull a build with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test,lint]'
	touch $@

# Report pages are tested in a browser. Where none can be had, those tests are skipped and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -qq -y chromium >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -qq -y chromium; } >/dev/null 2>&1 || true; \
	fi

test: venv browser
	$(BIN)/python -m pytest -rs

# Accelerate, Lightning and transformers are 200 MB and a minute to install, so `make test` does without: their tests are skipped.
test-frameworks: venv
	$(PIP) --editable '.[frameworks]'
	$(BIN)/python -m pytest tests/adapters tests/docs

lint: venv
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

# Pages into build/site. Every warning is an error: a link or an anchor that leads nowhere, a page outside the navigation.
docs: venv
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

demo: venv
	$(BIN)/thinwire demo

format: venv
	$(BIN)/ruff check --fix src tests examples
	$(BIN)/ruff format src tests examples

clean:
	rm -rf $(VENV) build dist
