"""The gate: who is let in, how, and what every answer carries."""

from __future__ import annotations

from tests.web.page import Page


def test_s1_the_token_lets_in_and_nothing_else_does(page: Page) -> None:
    """S1: the API answers to the token; without it 401."""
    assert page.get("/api/status").json()["daemon"]["alive"] is True
    assert page.ask("GET", "/api/status").status == 401
