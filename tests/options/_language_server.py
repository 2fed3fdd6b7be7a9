"""A client for a language server, which speaks the Language Server Protocol over the pipes of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

SETTINGS = {"python": {"pythonPath": sys.executable}, "basedpyright": {"analysis": {"diagnosticMode": "openFilesOnly"}}}


class LanguageServer:
    """basedpyright's language server, as an editor runs it, with one folder opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = 0
        self._diagnostics: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        command = [str(Path(sys.executable).with_name("basedpyright-langserver")), "--stdio"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self._folder)
        root = self._folder.as_uri()
        capabilities = {"workspace": {"configuration": True}}
        folders = [{"uri": root, "name": "root"}]
        self.ask("initialize", processId=None, rootUri=root, capabilities=capabilities, workspaceFolders=folders)
        self._send({"method": "initialized", "params": {}})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:  # which closes the pipes, and waits
            if error is None:
                self.ask("shutdown")
                self._send({"method": "exit"})
            else:
                self._process.kill()

    def open(self, name: str, text: str) -> str:
        """Open a file with this text, and return its URI."""
        uri = (self._folder / name).as_uri()
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        return uri

    def diagnostics(self, uri: str) -> list[Any]:
        """Wait for the errors and warnings of a file."""
        while uri not in self._diagnostics:
            self._receive()
        return self._diagnostics[uri]

    def completions(self, uri: str, line: int, character: int) -> list[str]:
        """Return the completions that an editor shows at a place, which is counted from 0."""
        document, place = {"uri": uri}, {"line": line, "character": character}
        found = self.ask("textDocument/completion", textDocument=document, position=place)
        return [item["label"] for item in found["items"]]

    def ask(self, method: str, **params: Any) -> Any:  # noqa: ANN401 - every method has its own
        """Send a request, and wait for its result."""
        self._last += 1
        number = self._last
        self._send({"id": number, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == number and "method" not in message:
                assert "error" not in message, message["error"]
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message. Answers the requests of the server, and keeps its diagnostics."""
        assert self._process.stdout is not None
        size = 0
        while (header := self._process.stdout.readline().strip()) != b"":
            name, _, value = header.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        assert size, "the language server has ended"
        message: dict[str, Any] = json.loads(self._process.stdout.read(size))
        if message.get("method") == "textDocument/publishDiagnostics":
            self._diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]
        if "id" in message and "method" in message:
            result: Any = None
            if message["method"] == "workspace/configuration":
                asked = (item.get("section", "") for item in message["params"]["items"])
                result = [SETTINGS.get(section, {}) for section in asked]
            self._send({"id": message["id"], "result": result})
        return message

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()
