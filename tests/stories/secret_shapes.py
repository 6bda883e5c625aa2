"""Forms in which people write passwords, tokens and keys on command lines."""

from __future__ import annotations

SECRET = "s3cr3tValue9xQ"
LONG = f"{SECRET}AbCdEfGhIjKlMnOp123456"
SHAPES: dict[str, tuple[str, ...]] = {
    "option=": (f"--token={SECRET}",),
    "option and word": ("--api-key", SECRET),
    "underscores": ("--wandb_api_key", SECRET),
    "camel case": (f"--dbPassword={SECRET}",),
    "with blanks": (f"--passphrase=my {SECRET}",),
    "one dash": ("-password", SECRET),
    "value with a dash": ("--password", f"-{SECRET}"),
    "variable": (f"HF_TOKEN={SECRET}",),
    "aws": (f"AWS_SECRET_ACCESS_KEY={SECRET}",),
    "hydra": (f"+logger.wandb.key={SECRET}",),
    "in shell text": ("sh", "-c", f"export PGPASSWORD='{SECRET}'; python t.py --secret {SECRET} | tee x"),
    "in escaped quotes": ("sh", "-c", f'sh -c "PGPASSWORD=\\"{SECRET}\\" true"'),
    "in json": ("--config", f'{{"lr": 1, "api_key": "{SECRET}"}}'),
    "in python": ("python", "-c", f"login(token='{SECRET}')"),
    "bearer": ("curl", "-H", f"Authorization: Bearer {SECRET}"),
    "header": ("curl", "-H", f"X-Api-Key: {SECRET}"),
    "url": (f"postgres://me:{SECRET}@db.host/x",),
    "query": (f"https://host/x?lr=1&access_token={SECRET}&b=2",),
    "user": ("curl", "--user", f"me:{SECRET}"),
    "huggingface": (f"hf_{LONG}",),
    "openai": ("x", f"sk-proj-{LONG}"),
    "github": (f"https://ghp_{LONG}@github.com/x.git",),
    "jwt": (f"eyJhbGciOiJIUzI1.{LONG}.{LONG}",),
    "private key": (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----",),
}
