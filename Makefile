# Everything here works in a fresh clone on a machine with python3 (3.11+) and make, and is quick the second time.
# Another Python: make demo PYTHON=python3.13.   More for pytest: make test ARGS="-k window".

PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN || echo 2) + 1)))
export PYTHON

# Without compiled files each of the many processes that the suite starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

# Files run side by side, in one process more than there are cores, since many tests wait. JOBS=0 runs them one by one.
SHARED = -n $(JOBS) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder -m "not alone and not spark and not soak"
ALONE = -n $(JOBS) --maxprocesses=2 --dist=loadgroup -m "(alone or spark) and not soak"

.DEFAULT_GOAL := help
.NOTPARALLEL: # there is one .venv
.PHONY: help demo pipeline test lint docs soak conformance lock clean ready-demo ready-pipeline ready-test

help:
	@echo "make demo         see it work: three transports, 101 channels each, every byte checked"
	@echo "make pipeline     see it work on Spark: servers and query killed, every row counted (minutes; about 1 GB to install)"
	@echo "make test         the whole test suite, then the part that needs a JVM"
	@echo "make lint         format, lint, spelling, workflows, types, import rules, docs/conformance.md, changelog fragments"
	@echo "make docs         the site, in build/site"
	@echo "make soak         the long forms: many seeds, many cycles (hours)"
	@echo "make conformance  write again the pages about clauses, log lines and troubleshooting"
	@echo "make lock         resolve the pinned versions again"
	@echo "make clean        remove .venv and what the tools left behind"

demo: ready-demo
	@.venv/bin/muxkit demo $(ARGS)

pipeline: ready-pipeline
	@.venv/bin/python -m muxkit_bench.proof --page build/muxkit-captures.html $(ARGS)

# Two runs: what can share the machine, then what traces its own memory or needs a JVM. 5 says that ARGS left nothing of one.
test: ready-test
	@shared=0; .venv/bin/python -m pytest $(SHARED) $(ARGS) || shared=$$?; \
	[ $$shared -eq 0 ] || [ $$shared -eq 5 ] || exit $$shared; \
	alone=0; .venv/bin/python -m pytest $(ALONE) $(ARGS) || alone=$$?; \
	[ $$alone -eq 0 ] || { [ $$alone -eq 5 ] && [ $$shared -eq 0 ]; } || exit $$alone

lint: ready-test
	@.ci/run format lint types imports conformance news

docs: ready-test
	@.ci/run docs

# Two processes share the tests, and then the programs run one by one.
soak: ready-test
	MUXKIT_SOAK=1 .venv/bin/python -m pytest -q -p no:cacheprovider -n $(JOBS) --maxprocesses=4 --dist=loadfile -m soak --timeout=0 $(ARGS)
	@for program in tests/soak/[!_]*.py; do \
	    [ -e "$$program" ] || continue; \
	    case $$program in */test_*|*/conftest.py) continue;; esac; \
	    echo "== $$program"; .venv/bin/python "$$program" || exit 1; \
	done

conformance: ready-test
	@.venv/bin/python tests/conformance.py
	@.venv/bin/python tests/logs.py
	@.venv/bin/python tests/options_page.py
	@.venv/bin/python tests/troubleshooting.py
	@.venv/bin/python docs/site/architecture.py

lock:
	@.ci/lock

clean:
	rm -rf .venv build dist htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready-demo ready-pipeline ready-test: ready-%:
	@.ci/setup $*
