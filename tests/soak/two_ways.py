"""Follow a message from `channel.send` to the socket, and from the socket to `channel.receive`, by static analysis.

    python -m tests.soak.two_ways [bpmux relink yamux]

The program asks pyright's language server for the definition of each call, as an editor does at "go to definition",
and searches the shortest way from the first function to the last one. It isn't told where to go in between. Where a
call leads to an abstract method, the way goes on in the classes that implement it. A way that isn't found means that
somebody who reads the code would get lost as well. Ends with 1 in that case.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import attrs

ROOT: Final = Path(__file__).resolve().parents[2]
ATTEMPTS: Final = 3
SOURCES: Final = ("muxkit", "adapters/muxkit_adapters")
SEND: Final = "muxkit/runtime/channel.py MuxChannel.send"
RECEIVE: Final = "muxkit/runtime/channel.py MuxChannel.receive"
READER: Final = "muxkit/runtime/pumps/reading.py Reading._read_now"
PULL: Final = "muxkit/runtime/pumps/stream.py StreamPump._pull"
DELIVER: Final = "muxkit/runtime/halves/receive.py ReceiveHalf.deliver"
RECEIVED: Final = "muxkit/runtime/halves/receive.py ReceiveHalf.receive"
TO_SOCKET: Final = "adapters/muxkit_adapters/_sockets.py SocketStream._write_batch"
FROM_SOCKET: Final = "adapters/muxkit_adapters/_sockets.py SocketStream.receive_nowait"
PROTOCOLS: Final = ("aqueduct", "bpmux", "e3x", "relink", "restream", "yamux")


@attrs.frozen
class Function:
    """A function or method of the project."""

    file: str
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef = attrs.field(eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file} {self.name}"


class Server:
    """pyright's language server."""

    def __init__(self) -> None:
        command = [str(Path(sys.executable).with_name("basedpyright-langserver")), "--stdio"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._count = 0
        self._opened: set[str] = set()
        self._known: dict[tuple[str, int, int], list[tuple[Path, int]]] = {}
        folder = {"uri": ROOT.as_uri(), "name": "muxkit"}
        self._ask(
            "initialize",
            {"processId": None, "rootUri": ROOT.as_uri(), "workspaceFolders": [folder], "capabilities": {}},
        )
        self._send({"method": "initialized", "params": {}})

    def definitions(self, file: str, line: int, column: int) -> list[tuple[Path, int]]:
        """Return where the name at this place is defined: files, with lines that count from 1."""
        if (known := self._known.get((file, line, column))) is not None:
            return known
        uri = (ROOT / file).as_uri()
        if file not in self._opened:
            self._opened.add(file)
            document = {"uri": uri, "languageId": "python", "version": 1, "text": (ROOT / file).read_text("utf-8")}
            self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        position = {"line": line - 1, "character": column}
        found = None
        for _ in range(ATTEMPTS):  # the server says nothing while it is still reading what a module imports
            found = found or self._ask("textDocument/definition", {"textDocument": {"uri": uri}, "position": position})
        places = [
            (Path(unquote(urlparse(each["uri"]).path)), each["range"]["start"]["line"] + 1) for each in found or ()
        ]
        self._known[file, line, column] = places
        return places

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # as it is a pipe
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _ask(self, method: str, params: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        self._count += 1
        self._send({"id": self._count, "method": method, "params": params})
        while True:
            answer = self._next()
            if "method" in answer and "id" in answer:  # the server asks us: nothing is configured here
                items = answer["params"].get("items", ()) if answer.get("params") else ()
                self._send({"id": answer["id"], "result": [{} for _ in items]})
            elif answer.get("id") == self._count:
                return answer.get("result")

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # as it is a pipe
        size = 0
        while line := self._process.stdout.readline().strip():
            key, _, value = line.partition(b":")
            if key.lower() == b"content-length":
                size = int(value)
        answer: dict[str, Any] = json.loads(self._process.stdout.read(size))
        return answer


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text("utf-8"))


@cache
def functions_in(file: str) -> tuple[Function, ...]:
    """Return the functions of a module, and the methods of its classes."""

    def walk(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(file, prefix + child.name, child)
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                yield from walk(child, prefix)

    return tuple(walk(tree_of(file), ""))


@cache
def files() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))


@attrs.define
class Class:
    """What a class of the project inherits and has, by name."""

    bases: set[str] = attrs.field(factory=set)
    methods: set[str] = attrs.field(factory=set)


@cache
def classes_in(file: str) -> dict[str, Class]:
    """Return the classes of a module with what they have themselves."""
    return {
        node.name: Class(
            {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases},
            {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)},
        )
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
    }


@cache
def whole(file: str, name: str) -> Class:
    """Return a class with what it inherits. A base of another module is looked up by its name alone."""
    one = classes_in(file)[name]
    known, todo, methods = set[str](), [(file, base) for base in one.bases], {*one.methods}
    while todo:
        place, base = todo.pop()
        if base not in known:
            known.add(base)
            for each in [place] if base in classes_in(place) else [at for at in files() if base in classes_in(at)]:
                methods |= classes_in(each)[base].methods
                todo += [(each, further) for further in classes_in(each)[base].bases]
    return Class(known, methods)


@cache
def implements(file: str, name: str, abstract_file: str, abstract_name: str) -> bool:
    """Return True if a class derives from another one, or has all methods of that `typing.Protocol`."""
    one, abstract = whole(file, name), whole(abstract_file, abstract_name)
    is_protocol = "Protocol" in classes_in(abstract_file)[abstract_name].bases
    return abstract_name in one.bases or (is_protocol and abstract.methods <= one.methods)


def implementations(function: Function, protocol: str) -> list[Function]:
    """Return the methods that implement this one, in the protocol, the runtime and the adapters."""
    owner, _, method = function.name.rpartition(".")
    if owner not in classes_in(function.file):
        return []
    others = tuple(f"muxkit/protocols/{name}/" for name in PROTOCOLS if name != protocol)
    return [
        other
        for file in files()
        if not file.startswith(others)
        for other in functions_in(file)
        if other.name.rpartition(".")[2] == method and other != function
        if (name := other.name.rpartition(".")[0]) in classes_in(file)
        if implements(file, name, function.file, owner)
    ]


def calls_in(server: Server, function: Function) -> Iterator[Function | Path]:
    """Yield what a function calls or reads as a property: functions of the project, and other files."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.Attribute):
            line, column = node.end_lineno, node.end_col_offset
            assert line is not None
            assert column is not None  # as the tree was parsed from text
            place = (line, column - len(node.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = (node.func.lineno, node.func.col_offset)
        else:
            continue
        for path, at in server.definitions(function.file, *place):
            if not path.is_relative_to(ROOT) or ".venv" in path.parts:
                yield path
                continue
            file = str(path.relative_to(ROOT))
            for each in functions_in(file) if file.endswith(".py") else ():
                first = min([each.node.lineno, *(one.lineno for one in each.node.decorator_list)])
                if first <= at <= each.node.body[0].lineno and each.node.lineno <= at:
                    yield each


def way(server: Server, start: str, goal: str, protocol: str) -> list[str] | None:
    """Return the shortest way from a function to another one, or to a module outside the project; None without one."""
    file, name = start.split()
    first = next(each for each in functions_in(file) if each.name == name)
    came_from: dict[Function, Function | None] = {first: None}
    todo = deque([first])
    while todo:
        current = todo.popleft()
        for found in (*calls_in(server, current), *implementations(current, protocol)):
            if str(found).endswith(goal):
                steps = [str(found)]
                step: Function | None = current
                while step is not None:
                    steps.insert(0, str(step))
                    step = came_from[step]
                return steps
            if isinstance(found, Function) and found not in came_from:
                came_from[found] = current
                todo.append(found)
    return None


WAYS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "bpmux": {
        "a message into the engine": (SEND, "muxkit/protocols/bpmux/send.py Sender.try_send"),
        "a request to write, to the socket": (SEND, TO_SOCKET),
        "what is written, out of the engine": (PULL, "muxkit/protocols/bpmux/send.py Outgoing.write"),
        "bytes from the socket": (READER, FROM_SOCKET),
        "bytes into the engine": (READER, "muxkit/protocols/bpmux/rules.py ChunkRules.apply"),
        "a message to its half": (READER, DELIVER),
        "the application takes it": (RECEIVE, RECEIVED),
    },
    "relink": {
        "a message into the engine": (SEND, "muxkit/protocols/relink/send.py ChannelSender.try_push"),
        "a request to write, to the socket": (SEND, TO_SOCKET),
        "what is written, out of the engine": (PULL, "muxkit/protocols/relink/send.py ChannelSender.write"),
        "bytes from the socket": (READER, FROM_SOCKET),
        "bytes into the engine": (READER, "muxkit/protocols/relink/receive.py ChannelReceiver.came"),
        "a message to its half": (READER, DELIVER),
        "the application takes it": (RECEIVE, RECEIVED),
    },
    "yamux": {
        "a message into the engine": (SEND, "muxkit/protocols/yamux/send.py StreamSender.send"),
        "a request to write, to the socket": (SEND, TO_SOCKET),
        "what is written, out of the engine": (PULL, "muxkit/protocols/yamux/send.py StreamSender.write"),
        "bytes from the socket": (READER, FROM_SOCKET),
        "bytes into the engine": (READER, "muxkit/protocols/yamux/receive.py StreamReceiver.receive"),
        "a message to its half": (READER, DELIVER),
        "the application takes it": (RECEIVE, RECEIVED),
    },
}


def main(protocols: list[str]) -> int:
    server, lost = Server(), 0
    try:
        for protocol in protocols or [*WAYS]:
            for what, (start, goal) in WAYS[protocol].items():
                steps = way(server, start, goal, protocol)
                lost += steps is None
                print(f"{protocol}: {what}: " + ("no way" if steps is None else f"{len(steps)} functions"))
                print(*(f"    {step}" for step in steps or ()), sep="\n")
    finally:
        server.close()
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
