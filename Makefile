PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo test test-slow sanitize bench reproduce-quick campaign records results format dist clean

demo: $(VENV)/.installed ## train a capsule network on the built-in sample, evaluate it, report
	rm -rf runs/demo
	OMP_WAIT_POLICY=passive $(BIN)/xncaps train --recipe quick --seed 0 --out runs/demo
	$(BIN)/xncaps evaluate runs/demo
	@echo
	@echo "Open the report in a browser: runs/demo/report.html"

test: $(VENV)/.installed-dev ## lint, types, tests and doctests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed-dev ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

# A venv of its own holds the sanitized build and borrows everything else from the other one.
SANITIZED := build/sanitized
SITE = lib/python$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages

sanitize: $(VENV)/.installed-dev ## the kernel tests on a build with ASan and UBSan
	rm -rf $(SANITIZED)
	$(PYTHON) -m venv $(SANITIZED)
	echo "$(CURDIR)/$(VENV)/$(SITE)" > $(SANITIZED)/$(SITE)/borrowed.pth
	$(SANITIZED)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--constraint constraints.txt --config-settings=cmake.define.XNCAPS_SANITIZE=ON .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(SANITIZED)/bin/python -m pytest tests/test_kernels*.py \
		-k "not compile and not export"

bench: $(VENV)/.installed-dev ## how fast everything is on this machine; appends to results/
	$(BIN)/xncaps bench

reproduce-quick: $(VENV)/.installed ## train one of the cheapest rows of the results again, and compare
	OMP_WAIT_POLICY=passive $(BIN)/python recipes/sample.py --only xnidr --seeds 0 --again

CAMPAIGN := $(addprefix tuning_,mnist multimnist cifar10 mobilenetv2 resnet50) \
	sample mnist multimnist cifar10 mobilenetv2 resnet50 mnist_ablations mnist_one_loss cifar10_one_loss \
	own_rates_multimnist
RECORDS := $(addprefix tuning_record_,mnist cifar10 multimnist) \
	$(addprefix record_,mnist cifar10 cifar10_longer cifar10_alternate multimnist)
RUN_THEM = trap "exit 130" INT TERM; status=0; \
	for name in $(1); do $(BIN)/python recipes/$$name.py || status=1; done; exit $$status

campaign: $(VENV)/.installed ## every comparison, a row in results/ for each run; goes on where it stopped
	$(call RUN_THEM,$(CAMPAIGN))

records: $(VENV)/.installed ## the runs that aim for records, in the same way
	$(call RUN_THEM,$(RECORDS))

results: $(VENV)/.installed ## make the tables and pictures of the documents anew from results/
	$(BIN)/xncaps results --update README.md --update docs/results.md
	$(BIN)/xncaps results --plots docs/plots

format: $(VENV)/.installed-dev ## put the code in form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: $(VENV)/.installed-dev ## build sdist and wheel, install the wheel in a new venv, use it there
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt dist/*.whl
	cd build && wheel-venv/bin/python -c "import xncaps; print(xncaps.create_model('convnet'))"
	cd build && wheel-venv/bin/xncaps --version

clean: ## remove what make made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "xncaps needs Python 3.11 or newer; pass one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

NATIVE := CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
