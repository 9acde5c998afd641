# pinactivity. `make help` lists the targets.
.DEFAULT_GOAL := help
SHELL := bash
# One to take instead of the first that embedded/find_python.sh finds.
PYTHON ?=
BIN := .venv/bin
NAME ?= closer

# What the tools that only read the code need of an environment; nothing connects to it.
DUMMY := PINACTIVITY_DEVELOPMENT=true DATABASE_URL=postgresql://nobody@127.0.0.1:1/nothing \
	REDIS_URL=redis://127.0.0.1:1/0 KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:1 \
	CLICKHOUSE_URL=http://127.0.0.1:1

# Paths in recipes are relative, and modules run instead of scripts: a folder's name may hold any
# character. The interpreter of an environment may be gone with an update of the system: then the
# environment is made anew.
define MAKE_VENV
@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	python=$$(sh embedded/find_python.sh $(if $(PYTHON),"$(PYTHON)")) || exit 1; \
	"$$python" -I embedded/room.py venv || exit 1; \
	echo "Python: $$("$$python" -c 'import sys; print(sys.version.split()[0], sys.executable)')"; \
	echo "making .venv of it, which takes a minute or two"; \
	rm -rf .venv && mkdir .venv || exit 1; \
	$(IN_VENV) "$$python" -m venv .venv || exit 1; \
fi
endef
# TMPDIR may be too small for a package of 200 MB.
IN_VENV := TMPDIR="$$PWD/.venv"
INSTALL := $(IN_VENV) $(BIN)/python -m pip install --quiet
ifeq ($(shell $(BIN)/python -c 'print(1)' 2>/dev/null),)
.PHONY: .venv/base
endif
QUICK := tests/unit tests/embedded/test_newcomer.py::test_here
IMPORTS := $(BIN)/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

SCHEMA = $(DUMMY) $(BIN)/python manage.py spectacular --fail-on-warn --validate

.PHONY: help up test test-quick test-newcomer test-kafka lint types check schema alerts bench requirements

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/base: requirements/base.txt requirements/embedded.txt
	$(MAKE_VENV)
	$(INSTALL) --require-hashes -r requirements/base.txt -r requirements/embedded.txt
	touch $@

.venv/dev: .venv/base requirements/dev.txt
	$(INSTALL) --require-hashes -r requirements/dev.txt
	touch $@

up: .venv/base ## Start everything on this machine, replay a day of visits, say where to look
	@$(BIN)/python -m embedded up $(ARGS)

test: .venv/dev ## Run all tests on real servers (ARGS="-k name" for some)
	@echo "All tests take 28 minutes on two cores, most of it waiting; make test-quick takes two."
	tests/chromium.sh
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m pytest $(ARGS)

test-quick: .venv/dev ## Run the unit tests, and one visit through all of `make up`, in two minutes
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m pytest $(QUICK) $(ARGS)

test-newcomer: .venv/dev ## Try out `make up` where newcomers are: users, folders, Pythons
	$(DUMMY) $(BIN)/python -m pytest tests/embedded/test_newcomer.py $(ARGS)

test-kafka: .venv/dev ## Run the tests that need a broker; KAFKA=apache runs them on Apache Kafka
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m pytest -m kafka $(ARGS)

lint: .venv/dev ## Check style, formatting and the direction of imports
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(IMPORTS)

types: .venv/dev ## Check types, strictly
	$(DUMMY) $(BIN)/python -m mypy .

check: .venv/dev ## Check Django's configuration, migrations, imports, schema and the compose file
	$(DUMMY) $(BIN)/python manage.py check --fail-level WARNING
	$(DUMMY) $(BIN)/python manage.py makemigrations --check --dry-run
	$(IMPORTS)
	$(BIN)/python -m check_jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	written=$$(mktemp) && trap 'rm -f "$$written"' EXIT && $(SCHEMA) --file "$$written" \
		&& { diff -u docs/openapi.yaml "$$written" || { echo "Run make schema." >&2; exit 1; }; }

schema: .venv/dev ## Write the API's schema, docs/openapi.yaml
	$(SCHEMA) --file docs/openapi.yaml

alerts: ## Check Prometheus' files and run the tests of the alerts, by promtool
	deploy/prometheus/promtool.sh

bench: .venv/dev ## Measure one thing against its limit: make bench NAME=closer
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m bench.$(NAME) $(ARGS)

requirements: ## Pin the packages anew, with hashes and without a registry's name
	$(MAKE_VENV)
	$(INSTALL) uv
	cd requirements && for part in base embedded dev; do \
		../$(BIN)/python -m uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
			--no-emit-index-url --no-emit-find-links --custom-compile-command "make requirements" \
			$$part.in -o $$part.txt || exit 1; done
