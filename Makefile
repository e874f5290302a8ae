# Two commands for a machine that has only Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test docs bench wheels clean

demo: $(VENV)/.installed
	$(BIN)/pliant demo

test: $(VENV)/.installed
	scripts/system-packages
	$(BIN)/ruff check .
	$(BIN)/mypy
	# Files with real processes come first; in xdist's own order the suite takes half as long again.
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

docs: $(VENV)/.installed
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/python scripts/api_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; with its search: python3 -m http.server -d build/site"

bench: $(VENV)/.installed
	scripts/system-packages
	$(BIN)/pliant bench allreduce -np 4 --model resnet50 --peers gloo,openmpi

wheels: $(VENV)/.installed
	rm -rf build/lib build/bdist.* build/wheels repro/build  # a build takes in what an earlier one has left
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w build/wheels . ./repro
	@ls build/wheels

$(VENV)/.installed: pyproject.toml repro/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]' -e './repro[peers]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
