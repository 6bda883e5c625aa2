"""The sign-in page and the page for refused requests. Both work without scripts."""

from __future__ import annotations

import html
import re
from string import Template

# Paths to which a browser may be redirected after signing in: only our pages, no path that names another host.
_PAGE = re.compile(r"/|/[a-z]{1,20}(/[0-9]{1,15})?", re.ASCII)
_STYLE = """\
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;padding:1.25rem;min-height:100vh;display:grid;place-items:center;font:1rem/1.5 system-ui,sans-serif;
background:#f5f6f8;color:#14181f}
main{width:100%;max-width:30rem;padding:1.5rem;border-radius:.75rem;border:1px solid #d5dae2;background:#fff}
h1{margin:0 0 .5rem;font-size:1.4rem}p{margin:.5rem 0}label{display:block;margin:1rem 0 .25rem;font-weight:600}
input,button{width:100%;font:inherit;padding:.6rem .75rem;border-radius:.5rem;border:1px solid #8a93a3}
input{background:Field;color:FieldText}
button{margin-top:1rem;border-color:#1a5fb4;background:#1a5fb4;color:#fff;font-weight:600;cursor:pointer}
:focus-visible{outline:3px solid #62a0ea;outline-offset:2px}
code{overflow-wrap:anywhere;font-size:.9em;padding:.1em .3em;border-radius:.3em;background:#eceff4}
.wrong{padding:.6rem .75rem;border-radius:.5rem;border:1px solid #a51d2d;color:#a51d2d}
@media(prefers-color-scheme:dark){body{background:#12151a;color:#e7eaf0}main{background:#1b2028;border-color:#39414e}
code{background:#2a313c}.wrong{border-color:#ff7b86;color:#ff9ba3}}
"""
# `same-origin`, because with `no-referrer` browsers send the form with `Origin: null`.
_PAGE_TEXT = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="referrer" content="same-origin">
<link rel="icon" href="data:,">
<title>$title · gpujob</title>
<style nonce="$nonce">$style</style>
</head>
<body>
<main>
<h1>$heading</h1>
$inner
</main>
</body>
</html>
""")
_FORM = Template("""\
<p>Sign in with $whose. This command shows it on the scheduler's machine:</p>
<p><code>$shows</code></p>
$wrong<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" required autofocus autocomplete="current-password" spellcheck="false"$described>
<input type="text" name="user" value="gpujob" autocomplete="username" hidden>
<input type="hidden" name="next" value="$next">
<button>Sign in</button>
</form>""")


def page_of(path: str) -> str:
    """Return the path to which the browser is redirected after signing in.

    This is ``path`` if it has the form of our pages' paths and is not `/login` or `/logout`, else ``/``.
    """
    return path if _PAGE.fullmatch(path) and path != "/login" and path != "/logout" else "/"


def login_page(token_file: str, nonce: str, next_page: str = "/", wrong: str = "") -> bytes:
    """Return the sign-in page.

    ``token_file``: path of the token file, quoted for a shell; empty: each user has a token of their own. ``next_page``: path to which the browser is redirected
    after signing in. ``wrong``: why the previous attempt to sign in failed; empty if no attempt has failed.
    """
    said = f'<p class="wrong" id="wrong" role="alert">{html.escape(wrong)}</p>\n' if wrong else ""
    inner = _FORM.substitute(
        whose="the token of this scheduler" if token_file else "your own token",
        shows=html.escape(f"cat {token_file}") if token_file else "gpujob token",
        wrong=said,
        described=' aria-invalid="true" aria-describedby="wrong"' if wrong else "",
        next=html.escape(page_of(next_page)),
    )
    return _whole("Sign in", "gpujob", inner, nonce)


def refusal_page(code: int, text: str, nonce: str) -> bytes:
    """Return the page that shows why a request was refused."""
    return _whole("Refused", f"Refused ({code})", f"<p>{html.escape(text)}</p>", nonce)


def _whole(title: str, heading: str, inner: str, nonce: str) -> bytes:
    text = _PAGE_TEXT.substitute(
        title=html.escape(title), heading=html.escape(heading), inner=inner, nonce=nonce, style=_STYLE
    )
    return text.encode()
