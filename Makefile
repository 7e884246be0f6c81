# One command from a bare checkout: `make reproduce`, `make test` or `make lab` sets up what it needs.
comma := ,
PY    ?= python3
VENV  ?= .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG ?= .venv-sglang
# flashinfer and the GPU's own libraries only where there is an NVIDIA GPU.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS  := lab,test$(if $(HAS_GPU),$(comma)gpu)
# Options for pip, such as the address of the wheel index that you use.
PIP_OPTIONS ?=

.PHONY: setup lab reproduce notebooks export bench-ui test gpu-test server-bench lock lint

reproduce: setup
	$(BIN)/shadowkv reproduce --notebook

test: setup
	$(BIN)/python -m pytest

# On this machine alone, and with a token. From a GPU machine: ssh -L 8888:127.0.0.1:8888 HOST,
# then open the address that it prints.
lab: setup
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1

# Execute every notebook and write it back; recorded runs, or LIVE=1 to measure here.
notebooks: setup
	for nb in notebooks/*.ipynb; do $(BIN)/shadowkv run-notebook "$$nb" || exit 1; done

# One offline HTML file a notebook, under out/.
export: setup
	for nb in notebooks/*.ipynb; do $(BIN)/shadowkv export "$$nb" || exit 1; done

# What the notebooks must reach: key press to figure, import, 02_glm5_report.
bench-ui: setup
	$(BIN)/python scripts/bench_ui.py

# On a GPU machine: the tests that need a GPU, and a record of how they went.
gpu-test: setup
	$(BIN)/python -m pytest -m gpu --gpu-record

# On a GPU machine, in the environment of an SGLang 0.5.23: servers with and without the lab's
# strategies, measured. `make server-bench ARGS="--page-size 64 --limit 560"`; see CONTRIBUTING.
server-bench:
	$(PY) scripts/server_bench.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) -c constraints.txt -e '.[$(EXTRAS)]'
	mkdir -p $(VENV)/share/jupyter/lab/settings
	printf '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}\n' > $(VENV)/share/jupyter/lab/settings/overrides.json
	mkdir -p $(VENV)/etc/jupyter
	printf '{"FileContentsManager": {"pre_save_hook": "shadowkv_lab.ui.notebooks.pre_save"}}\n' > $(VENV)/etc/jupyter/jupyter_server_config.json
	touch $@

# The tested set: everything but torch's own companions, which torch pins itself.
lock: setup $(SGLANG)/.installed
	for bin in $(BIN) $(SGLANG)/bin; do $$bin/python -m pip freeze --all --exclude-editable; done \
		| grep -viE '^(pip|torch|triton|nvidia-|cuda-|sglang)\b' | sort -fu > constraints.txt
	echo 'torch==2.13.0' >> constraints.txt

# The tests of the SGLang plug-in on SGLang's own classes, in an environment of their own. Without
# its requirements, among which are a CUDA build of torch and compiled kernels.
.PHONY: test-sglang

test-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest tests/sglang -p no:cacheprovider

$(SGLANG)/.installed: pyproject.toml constraints.txt tests/sglang/requirements.txt
	test -x $(SGLANG)/bin/python || $(PY) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q --no-compile $(PIP_OPTIONS) -c constraints.txt -e . -r tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install -q --no-compile $(PIP_OPTIONS) --no-deps sglang==0.5.23
	touch $@
