# make run | test | lab | clean.  ARGS passes options on: make run ARGS="2 -p device cpu"
PYTHON ?= python3
BIN := .venv/bin
# Written last, so that an install that was interrupted is done again.
STAMP := .venv/.installed

.PHONY: run test lab install clean

run: $(STAMP)
	@$(BIN)/python -m vitkit run $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

lab: $(STAMP)
	@$(BIN)/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(ARGS)

install: $(STAMP)

# pip belongs to the interpreter of .venv; a .venv without a working pip was interrupted and is made anew.
$(STAMP): requirements.txt pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " + sys.version.split()[0] + ", but vitkit needs 3.11 or later: make PYTHON=/path/to/python3")' \
	  && $(PYTHON) -m venv --clear .venv; }
	@echo "Installing requirements.txt into .venv; torch alone takes a while and, with CUDA, several GB."
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $(STAMP)

# Keeps .venv (rm -r .venv removes it), data/ and figures/.
clean:
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find vitkit tests -name __pycache__ -type d -prune -exec rm -rf {} +
