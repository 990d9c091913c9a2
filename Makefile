# Two commands: `make demo` and `make test`. Each sets up what it needs, and is quick when that is done already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# compiled files are kept, whatever the environment says: each process would compile all files again
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick-tests lint docs wheel check-all lock locked sbom clean

# all images in one place, from the public weights that analytic starts from; the layers up to block11 stay as they are
POOLED := --set method.name=centralized --set model.backbone=efficientnet-lite0 --set model.weights=public \
	--set model.freeze=block11 --set model.input_size=128 --set optimizer.name=adam --set optimizer.lr=0.001

demo: $(VENV)/.ready
	rm -rf runs/demo
	$(BIN)/polyclinic compare examples/demo.toml --methods standalone,fedavg,cwt,fedreplay,analytic,centralized \
		--set analytic:model.backbone=efficientnet-lite0-1024 --set analytic:model.input_size=128 --out runs/demo
	$(BIN)/polyclinic run examples/demo.toml $(POOLED) --out runs/demo/centralized-public
	$(BIN)/polyclinic audit runs/demo/fedreplay-seed0  # what its latents and its encoder give away, in pictures

test: $(VENV)/.ready-dev
	$(MAKE) --jobs 2 lint quick-tests

# three processes for two cores: some tests wait for processes, servers and deadlines
quick-tests: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

# everything that can be checked on one machine: also the site, the package, and tests that are slow
check-all: test docs wheel
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "hypothesis and not slow" --hypothesis-profile=thorough
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(SLOW)
	OMP_NUM_THREADS=1 $(BIN)/python lab/campaigns/faults.py --minutes $(FAULT_MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python lab/campaigns/fuzz.py --minutes $(FAULT_MINUTES)

# how long `make check-all` looks for faults, each of its two campaigns
FAULT_MINUTES ?= 10

# which slow tests `make check-all` runs: all of them, or `make check-all SLOW=tests/browser`
SLOW ?= tests

docs: $(VENV)/.ready-docs  # into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.ready-dev $(VENV)/.ready-release  # wheel and sdist into dist/; the wheel runs in a new environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -m slow tests/test_publishing.py

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# files are compiled when they are imported: most of what is installed never is
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(VENV)/pins.txt --editable

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# the versions of the lock without their hashes: pip wants a hash of everything where it is given one, and the package
# itself has none; and so the torch that is nearest is taken, one for CPUs as well
$(VENV)/pins.txt: requirements.lock | $(BIN)/python
	sed -n 's/^\([a-z0-9._-]*==[^ ;]*\).*/\1/p' requirements.lock > $@

$(VENV)/.ready: pyproject.toml $(VENV)/pins.txt | $(BIN)/python
	$(INSTALL) ".[figures,segmentation]"
	touch $@

# with all that tests need, in one go: to install the package first and the rest afterwards takes longer
$(VENV)/.ready-dev: pyproject.toml lab/pyproject.toml $(VENV)/pins.txt | $(BIN)/python
	$(INSTALL) ".[dev,nvflare,ray]" --editable lab
	touch $(VENV)/.ready $@

$(VENV)/.ready-docs $(VENV)/.ready-release: $(VENV)/.ready-%: $(VENV)/.ready
	$(INSTALL) ".[$*]"
	touch $@

# the environment of both commands with all extras, where every file is checked against its hash; its torch is that of
# the package index, which has CUDA on Linux
locked: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable lab
	touch $(VENV)/pins.txt $(VENV)/.ready $(VENV)/.ready-dev

# requirements.lock anew, with uv on the PATH; versions stay as they are there: make lock UPGRADE="--upgrade-package numpy"
lock:
	uv pip compile pyproject.toml --all-extras --universal --python-version 3.11.5 --generate-hashes --no-emit-index-url \
		--no-annotate --no-header --quiet $(UPGRADE) --output-file requirements.lock

# the packages of this environment, with uv on the PATH: a software bill of materials, CycloneDX JSON
sbom: $(VENV)/.ready
	mkdir -p build
	uvx --from cyclonedx-bom cyclonedx-py environment $(BIN)/python --output-file build/sbom.json

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
