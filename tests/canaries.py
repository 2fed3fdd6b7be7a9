"""Secrets that tests plant, and what watches the log of the library for them during the whole suite."""

from __future__ import annotations

import logging
from typing import Final

TOKEN: Final = "token-canary-5f1c"
PASSPHRASE: Final = "passphrase-canary-77aa"
PASSWORD: Final = "password-canary-0b3d"
QUERY: Final = "query-canary-9e42"
PAYLOAD: Final = "payload-canary-c6d8"

PLANTED: Final = (
    TOKEN,
    PASSPHRASE,
    PASSWORD,
    QUERY,
    PAYLOAD,
    # Of other tests.
    "secret-canary",
    "canary-secret",
    "payload-canary",
    "a-token-that-no-log-shows",
    "a-long-random-token",
    "correct horse",
    "battery staple",
)


def secrets_in(text: str | bytes) -> list[str]:
    """The planted secrets that the text holds."""
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return [secret for secret in PLANTED if secret in whole]


class LeakWatch(logging.Handler):
    """Collects the lines that hold a planted secret: the text and the fields, and of DEBUG not the traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        ours = {
            name: value for name, value in vars(record).items() if name not in ("exc_info", "exc_text", "args", "msg")
        }
        told = f"{record.getMessage()} {ours}"
        if record.exc_info and record.levelno > logging.DEBUG:
            told += logging.Formatter().formatException(record.exc_info)
        if secrets_in(told):
            self.found.append(f"{record.levelname} {record.getMessage()}")
