"""The facts about an attempt (`core/run_facts.py`) as text, for the column `facts` of the table `jobs`."""

from __future__ import annotations

import json

from scheduler.core.run_facts import Code, RunFacts


def facts_text(facts: RunFacts | None) -> str:
    """Return the facts of an attempt as text for the store; empty for None."""
    if facts is None:
        return ""
    code = facts.code
    return json.dumps(
        [facts.environment, facts.variables, facts.packages,
         None if code is None else [code.path, code.size, code.digest, code.commit]]
    )  # fmt: skip


def facts_of(text: str) -> RunFacts | None:
    """Return the facts that `facts_text` has written; None for an empty text. Raises ValueError, TypeError."""
    if not text:
        return None
    environment, variables, packages, code = json.loads(text)
    pairs = tuple((name, value) for name, value in variables)
    return RunFacts(environment, pairs, packages, None if code is None else Code(*code))
