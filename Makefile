# Two commands: `make demo` and `make test`. Both set everything up first, on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: venv test lint demo format clean

venv: $(VENV)/.installed

# torch goes first and pinned: an open range asked for by another package would pull a build with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test,lint]'
	touch $@

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

demo: venv
	$(BIN)/thinwire demo

format: venv
	$(BIN)/ruff check --fix src tests examples
	$(BIN)/ruff format src tests examples

clean:
	rm -rf $(VENV) build dist
