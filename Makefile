# make run, make test and make lint install what they need on the first run. make help lists every target.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCH := $(VENV)-bench
CLIENTS := $(VENV)-clients
NODE := build/node
PACKAGES := $(VENV)-packages
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
RELEASE := https://github.com/gradserve/gradserve
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := -m pip install --quiet --editable
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
IN_FOUR := -n 4 --dist worksteal
HEAVY := dashboard examples faults clients/torch clients/arrays graphs/gradients graphs/zoo $(addsuffix .py,\
  $(addprefix api/test_,buffers_into fuzz schema shared_memory triton_client) \
  $(addprefix test_,doctor end_to_end start transfer) $(addprefix clients/test_,pushes rows tensors types) \
  $(addprefix kernels/test_,gru blocks hostile properties) \
  $(addprefix buffers/test_,state_machine formats room lmdb_map lmdb_pages) codecs/test_same_bits graphs/test_layers)
QUICK := $(addprefix --ignore=tests/,$(HEAVY)) -m 'not processes' -k 'not postgres'
LIGHT := $(addprefix tests/,$(addsuffix %,api buffers codecs deploy engine host kernels)) service%
NEEDED := $(VENV)/.$(if $(filter-out $(LIGHT),$(or $(filter tests% service%,$(WHAT)),all)),frameworks,dev)
# For Linux alone. Later releases of tritonclient come without the program.
PERF_ANALYZER := tritonclient==2.46.0 nvidia-cuda-runtime-cu12==12.9.79
WHAT ?=
SECONDS ?= 60

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help:  ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 15

run: $(VENV)/.run  ## serve on 127.0.0.1:8000 (GRADSERVE_HOST, GRADSERVE_PORT)
	@exec $(BIN)/gradserve serve

check: lint  ## lint and most tests, for every edit: none that starts servers or commands, and none that HEAVY lists
	$(PYTEST) $(IN_FOUR) $(QUICK)

test: $(NEEDED)  ## run every test in four processes, or WHAT="tests/codecs/test_json.py -k name" in one
	$(PYTEST) $(or $(WHAT),$(IN_FOUR))

peers: $(VENV)/.peers  ## install KServe's client, with a hundred packages, and NVIDIA's perf_analyzer, so that make test tries them, too

test-faults: $(VENV)/.frameworks  ## long runs of the tests that kill servers, fill disks and cut power
	GRADSERVE_FAULTS=long $(PYTEST) -o faulthandler_timeout=3600 tests/faults $(WHAT)

openapi: $(VENV)/.dev $(NODE)/.installed  ## lint the OpenAPI document with Redocly and Spectral
	$(BIN)/python -m tests.generated_clients.document > build/openapi.json
	REDOCLY_TELEMETRY=off $(NODE)/node_modules/.bin/redocly lint --config tests/generated_clients/redocly.yaml build/openapi.json
	$(NODE)/node_modules/.bin/spectral lint --ruleset tests/generated_clients/spectral.yaml --fail-severity hint build/openapi.json

clients: $(VENV)/.dev $(NODE)/.installed $(CLIENTS)/.installed  ## generate clients in TypeScript, Go, Python and Java, and call a server
	GRADSERVE_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/python -m pytest -n 2 tests/generated_clients $(WHAT)

fuzz: $(VENV)/.dev  ## decode damaged and compressed bodies for SECONDS=60, then send random requests, hostile calls, damaged and random models, random changes of buffers, and flip bits of stores
	$(BIN)/python -m tests.fuzz.decoders --seconds $(SECONDS)
	GRADSERVE_FUZZ=100 $(BIN)/python -m pytest -o faulthandler_timeout=3600 tests/kernels/test_hostile.py tests/graphs/test_hostile_models.py tests/graphs/onnx_suite.py tests/api/test_schema.py tests/api/test_fuzz.py tests/api/test_random_graphs.py tests/buffers/test_state_machine.py tests/buffers/test_lmdb_pages.py tests/faults/test_state_machine.py

examples: $(VENV)/.frameworks  ## train through the service: processes that share, join and die, a GRU, a bad network, local steps, JAX, scikit-learn, a notebook
	$(BIN)/python examples/digits_data_parallel.py
	$(BIN)/python examples/gru_rows.py
	$(BIN)/python examples/torch_micro_batches.py
	$(BIN)/python examples/elastic_workers.py
	$(BIN)/python examples/local_sgd.py
	$(BIN)/python examples/jax_digits.py
	$(BIN)/python examples/sklearn_logistic.py
	$(BIN)/jupyter execute examples/quickstart.ipynb

up:  ## build and start the containers: gradserve behind nginx on 127.0.0.1:8080 (GRADSERVE_LISTEN)
	@deploy/up

up-cluster:  ## start three replicas over PostgreSQL with a synchronous standby, on 127.0.0.1:8090 (GRADSERVE_LISTEN_CLUSTER)
	@deploy/up cluster

down:  ## stop the containers; the buffers are kept
	@deploy/containers/engine compose --profile cluster --profile metrics down

test-compose: $(VENV)/.dev  ## test new containers, or the server at GRADSERVE_URL with GRADSERVE_API_KEY
	@test -n "$$GRADSERVE_URL" || tests/integration/containers/prepare
	GRADSERVE_INTEGRATION=1 $(BIN)/python -m pytest tests/integration $(WHAT)

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH)/.bench  ## speed and memory against ONNX Runtime's kernels, PyTorch's GRU, a plain FastAPI endpoint, or another checkout: AGAINST=DIRECTORY
	$(BENCH)/bin/python -m benchmarks.kernels $(if $(AGAINST),--against $(AGAINST))
	$(BENCH)/bin/python -m benchmarks.operators
	$(BENCH)/bin/python -m benchmarks.gru
	$(BENCH)/bin/python -m benchmarks.http

bench-%: benchmarks/%.py $(BENCH)/.bench  ## run one of the benchmarks that benchmarks/README.md lists
	$(BENCH)/bin/python -m benchmarks.$*

soak: $(BENCH)/.bench  ## overload the server for three minutes, then abandon requests and send slowly
	$(BENCH)/bin/python -m benchmarks.soak --seconds 180

golden: $(BENCH)/.bench  ## ask ONNX Runtime's kernels and PyTorch again for the answers in tests/golden: FAMILY=NAME for one module of kernels
	$(BENCH)/bin/python -m tests.golden.make $(FAMILY)

graphs: $(VENV)/.zoo $(if $(FOLDER),$(BENCH)/.bench)  ## train all models of tests/graphs/zoo; with FOLDER, run also the training graphs there (tests/golden/make_graphs.py), whole and by nodes
	GRADSERVE_ZOO=whole $(BIN)/python -m pytest -q -o faulthandler_timeout=1800 tests/graphs/zoo $(WHAT)
ifdef FOLDER
	$(BENCH)/bin/python -m tests.golden.make_graphs $(FOLDER) --all build/graphs
	GRADSERVE_GRAPHS=build/graphs $(BIN)/python -m pytest -q tests/api/test_graphs.py
	GRADSERVE_GRAPHS_FOLDER=$(FOLDER) $(BIN)/python -m pytest -q tests/graphs/test_training.py
endif

screenshots: $(VENV)/.frameworks  ## make the screenshots of docs/images again, with Chromium
	$(BIN)/python -m tests.dashboard.screenshots $(WHAT)
	$(BIN)/python -m tests.dashboard.states

movie: $(VENV)/.frameworks  ## make the moving picture docs/images/training.gif again, with Chromium
	$(BIN)/python -m tests.dashboard.movie

docs: $(VENV)/.dev  ## generate the tables of the documents and the modules of the client
	$(BIN)/python -m tests.documentation
	$(BIN)/python -m clients.python.generate

site: $(VENV)/.site  ## build the documentation into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# W002: the licence of Swagger UI is beside its files and, as every licence, in the metadata.
# A package index shows the README without its folder: in the packages its links and pictures lead to the release.
packages: $(VENV)/.dev $(PACKAGES)/.packages  ## build the wheels and sdists into dist/, check them, and install them where nothing else is
	rm -rf dist build
	$(PACKAGES)/bin/validate-pyproject pyproject.toml clients/python/pyproject.toml
	mkdir -p build/source && git ls-files -z | tar -c --null -T - | tar -x -C build/source
	for readme in README.md clients/python/README.md; do sed -E \
	  -e 's%(!\[[^]]*\]\()([^):]+)\)%\1$(RELEASE)/raw/v$(VERSION)/\2)%g' \
	  -e 's%\]\((\.\./)*([^)#:]+)(#[^)]*)?\)%]($(RELEASE)/blob/v$(VERSION)/\2\3)%g' \
	  -e "s%\]\(#%]($(RELEASE)/blob/v$(VERSION)/$$readme#%g" $$readme > build/source/$$readme || exit; done
	$(PACKAGES)/bin/python -m build --quiet --outdir dist build/source
	$(PACKAGES)/bin/python -m build --quiet --outdir dist build/source/clients/python
	for sdist in dist/*.tar.gz; do $(PACKAGES)/bin/pyroma --min 9 $$sdist || exit; done
	$(PACKAGES)/bin/check-wheel-contents --ignore W002 --toplevel gradserve.py,service dist/gradserve-*.whl
	$(PACKAGES)/bin/check-wheel-contents dist/gradserve_client-*.whl
	$(PACKAGES)/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/server
	build/server/bin/python -m pip install --quiet dist/gradserve-*.whl
	$(PYTHON) -m venv build/container
	build/container/bin/python -m pip install --quiet "$$(echo dist/gradserve-*.whl)[graphs,postgres,simdjson]"
	mkdir -p build/sbom
	$(PACKAGES)/bin/cyclonedx-py environment build/container/bin/python --pyproject pyproject.toml --output-file build/sbom/gradserve.cdx.json
	GRADSERVE_PACKAGES=1 $(BIN)/python -m pytest tests/packages $(WHAT)

lock:  ## update constraints.txt to the newest versions that fit
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	PIP_CONSTRAINT= $(VENV)-lock/bin/python -m pip install --quiet 'setuptools>=77' '.[dev,frameworks,zoo,peers,bench,site,packages]' './clients/python[cli]'
	$(VENV)-lock/bin/python -m pip freeze --all | grep -E '^[A-Za-z0-9._-]+==' | grep -vE '^(pip|gradserve|gradserve-client)==' | sed 's/+.*//' > constraints.txt
	rm -rf $(VENV)-lock build clients/python/build

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(BENCH) $(CLIENTS) $(PACKAGES) build clients/python/build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.run: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv-check
	@echo "installing the server and its packages into $(VENV), once: about a minute"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP) '.[graphs,postgres,simdjson]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run clients/python/pyproject.toml
	@echo "installing what lint and most tests need into $(VENV), once: about a minute"
	@$(BIN)/python $(PIP) '.[dev]' --editable './clients/python[cli]'
	@touch $@

$(VENV)/.frameworks: $(VENV)/.dev
	@echo "installing PyTorch, JAX and scikit-learn into $(VENV), once: some minutes, up to 5 GB"
	@$(BIN)/python $(PIP) '.[dev,frameworks]'
	@rm -rf .mypy_cache  # of the same sources without them
	@touch $@

$(VENV)/.zoo: $(VENV)/.frameworks
	@echo "installing the models of Hugging Face into $(VENV), once: about a minute"
	@$(BIN)/python $(PIP) '.[zoo]'
	@touch $@

$(VENV)/.peers: $(VENV)/.dev
	$(BIN)/python $(PIP) '.[peers]'
	-PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/perf_analyzer $(PERF_ANALYZER)
	@touch $@

$(VENV)/.site: $(VENV)/.run
	$(BIN)/python $(PIP) '.[site]'
	@touch $@

$(PACKAGES)/.packages: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv-check
	test -x $(PACKAGES)/bin/pip || $(PYTHON) -m venv --clear $(PACKAGES)
	$(PACKAGES)/bin/python $(PIP) '.[packages]'
	@touch $@

$(BENCH)/.bench: pyproject.toml constraints.txt clients/python/pyproject.toml
	@$(MAKE) --no-print-directory venv-check
	test -x $(BENCH)/bin/pip || $(PYTHON) -m venv --clear $(BENCH)
	$(BENCH)/bin/python $(PIP) '.[bench]' --editable ./clients/python
	@touch $@

$(CLIENTS)/.installed: tests/generated_clients/requirements.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	PIP_CONSTRAINT= $(CLIENTS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

$(NODE)/.installed: $(addprefix tests/generated_clients/,package.json package-lock.json .npmrc)
	@command -v npm >/dev/null || { echo "this needs Node.js 18 or newer; on Debian: apt-get install nodejs npm" >&2; exit 1; }
	mkdir -p $(NODE) && cp $^ $(NODE)
	cd $(NODE) && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

venv-check:
	@command -v $(PYTHON) >/dev/null || { echo "gradserve needs Python 3.11 or newer; on Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gradserve needs Python 3.11 or newer, but $(PYTHON) is `$(PYTHON) -V`; try make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
