"""Where a writeup puts what: a Markdown template a project, with the headings of its pull-request template.

What stands in braces is filled in from the rows; what is in comments is for the author to write, and no box is ticked.
"""

PLAIN = """# <!-- Title: what is faster, where -->

<!-- What was changed and why, in two or three sentences. -->

## Environment

{environment}

## Results

{results}

## Accuracy

{accuracy}

## Traffic

{traffic}

## Figures

{figures}

## Rows that failed their check

{failed}

## How to repeat

{commands}

{full_environment}
"""

VLLM = """## Purpose

<!-- What this changes and why; the issue that it resolves (FIX #...). Say which models and back ends it touches. -->

## Test Plan

<!-- Which tests you ran, and against which version of vLLM. -->

{commands}

## Test Result

{environment}

{results}

### Accuracy

{accuracy}

<!-- An end-to-end accuracy of a model that uses the change, before and after. -->

### Traffic

{traffic}

### Rows that failed their check

{failed}

### Figures

{figures}

{full_environment}

---

<!-- Keep the checklist that the form puts below this line, and tick there what you have done. -->
"""

SGLANG = """## Motivation

<!-- Which problem this solves, for whom. -->

## Modifications

<!-- What was changed, file by file. -->

## Accuracy Tests

{accuracy}

<!-- An evaluation of a model that uses the change, before and after. -->

### Rows that failed their check

{failed}

## Benchmarking and Profiling

{environment}

{results}

### Traffic

{traffic}

### Figures

{figures}

### How to repeat

{commands}

{full_environment}

## Checklist

- [ ] The code is formatted with pre-commit.
- [ ] Unit tests are added.
- [ ] The documentation follows the change.
- [ ] Results for accuracy and speed are above.
- [ ] The code follows the project's style.

## Review Process

<!-- Keep the steps that the form lists here: whom to ask, whose approval is needed, how CI is started. -->
"""

TRANSFORMERS = """# What does this PR do?

<!-- What was changed and why; which models it touches; new dependencies, if any. -->

<!-- Fixes # (issue), or remove this line. -->

{environment}

{results}

### Accuracy

{accuracy}

### Traffic

{traffic}

### Rows that failed their check

{failed}

### Figures

{figures}

### How to repeat

{commands}

{full_environment}

## Before submitting

<!-- Take over every box, and any declaration, that the form shows; these are the usual ones. -->

- [ ] This fixes a typo or improves the documentation alone (the other boxes then do not apply).
- [ ] I have read the contributor guideline and the checks for pull requests.
- [ ] This was discussed in an issue or in the forum: <!-- link -->
- [ ] The documentation follows the change.
- [ ] New tests are written where they were needed.

## Who can review?

<!-- Those who know the vision models, no more than three; git blame names them. -->
"""

STYLES = {"plain": PLAIN, "vllm": VLLM, "sglang": SGLANG, "transformers": TRANSFORMERS}
