"""What mkdocs is told beside its configuration: files above docs, links to them, and drawings of states.

The pages stay what a code host shows: their links to `../README.md` or `../examples` lead to files of the project. On
the site each of those files has a page, made here.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
EXAMPLES: Final = ROOT / "examples"

# Files above docs that stand in the navigation. The first page of the site says what the README says.
PAGES: Final = {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "CODE_OF_CONDUCT.md": "project/conduct.md",
    ROOT / "CHANGELOG.md": "project/changelog.md",
    ROOT / "SECURITY.md": "project/security.md",
    ROOT / "LICENSE": "project/licence.md",
    EXAMPLES: "examples/index.md",
}
LINK: Final = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
BLOCK: Final = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
DIAGRAM: Final = re.compile(r"^```mermaid\nstateDiagram-v2\n(?P<steps>.*?)^```$", re.DOTALL | re.MULTILINE)
MEMBERS: Final = re.compile(
    r"^::: (?P<module>[\w.]+)\n    options: \{ heading_level: (?P<level>\d), show_root_heading: false, "
    r"show_root_toc_entry: false, show_docstring_description: false, members: \[(?P<names>[\w, ]+)\] \}$",
    re.MULTILINE,
)
UNSEARCHED: Final = ("source/", "conformance")  # for those who work on muxkit, and long
WEIGHTS: Final = {
    "how-to/questions": 8.0,
    "how-to/choose": 6.0,
    "how-to/troubleshooting": 2.0,
    "how-to/": 4.0,
    "tutorial/": 2.0,
    "reference/api/": 0.5,
    "reference/what-the-peer-reads": 0.5,
    "explanation/performance-log": 0.2,
    "explanation/performance-targets": 0.2,
    "explanation/decisions/": 0.2,
    "project/": 0.5,
    "examples/": 0.5,
}
OPTIONS_PAGE: Final = "reference/options"
IMAGE: Final = re.compile(r'<img[^>]* src="(?P<target>[^":]+\.svg)"[^>]*>')
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".sh": "bash"}

# Names of Trio that signatures mention, by the page of Trio's documentation that describes them.
TRIO: Final = "https://trio.readthedocs.io/en/stable/"
TRIO_PAGES: Final = {
    "reference-core": (
        "BrokenResourceError BusyResourceError CancelScope Cancelled ClosedResourceError EndOfChannel Event "
        "MemoryReceiveChannel MemorySendChannel Nursery TaskStatus TooSlowError WouldBlock abc.Clock "
        "fail_after move_on_after open_memory_channel open_nursery run sleep"
    ),
    "reference-io": (
        "SSLListener SSLStream SocketListener SocketStream StapledStream abc.AsyncResource abc.Channel "
        "abc.HalfCloseableStream abc.Listener abc.ReceiveChannel abc.ReceiveStream abc.SendChannel abc.SendStream "
        "abc.Stream"
    ),
    "reference-testing": "testing.MockClock",
}

# Names of typed dictionaries, in the docstrings of the calls that take them.
OPTIONS_CODE: Final = re.compile(
    r"(?<!\">)<code>(?:\w+\.)?(?:Connect|Reconnect|Serve|Dial|Listen)Options</code>(?!</a>)"
)

TRIO_CODE: Final = re.compile(r"(?<!\">)<code>trio\.(?P<name>[\w.]+)(?:\(\))?</code>(?!</a>)")

log: Final = logging.getLogger("mkdocs.muxkit")


# ---------------------------------------------------------------------------- called by mkdocs


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put in place of `folder/*` in the navigation every page of that folder."""
    generated = above().values()

    def filled(items: list[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, dict):
                yield {title: [*filled(inner)] if isinstance(inner, list) else inner for title, inner in item.items()}
            elif item.endswith("/*"):
                folder = item.removesuffix("*")
                written = [path.relative_to(DOCS).as_posix() for path in (DOCS / folder).glob("*.md")]
                pages = {*written, *(uri for uri in generated if uri.startswith(folder))}
                yield from sorted(pages, key=lambda uri: (not uri.endswith("/index.md"), uri))
            else:
                yield item

    config["nav"] = [*filled(config["nav"])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose sources lie above docs, and let names of Trio lead to its documentation."""
    autorefs: Any = config.plugins["autorefs"]  # mkdocs types its plugins by their base class
    for page, names in TRIO_PAGES.items():
        for name in names.split():
            autorefs.register_url(f"trio.{name}", f"{TRIO}{page}.html#trio.{name}")
    for path, uri in above().items():
        if uri != "index.md":
            level = InclusionLevel.NOT_IN_NAV if uri.startswith("source/") else InclusionLevel.INCLUDED
            files.append(File.generated(config, uri, content=page_of(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files above docs lead to their pages, and draw diagrams of states."""
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    page.meta.setdefault("search", {"exclude": True} if uri.startswith(UNSEARCHED) else {"boost": weight(uri)})
    sources = {there: path for path, there in above().items() if there != "index.md"}
    markdown = MEMBERS.sub(each_member, markdown)
    folder = EXAMPLES if uri == "examples/index.md" else sources.get(uri, DOCS / uri).parent
    drawn = DIAGRAM.sub(lambda found: state_diagram(found["steps"]), markdown)
    kept, at = [], 0
    for block in BLOCK.finditer(drawn):
        kept += [relinked(drawn[at : block.start()], folder, uri), block[0]]
        at = block.end()
    return "".join([*kept, relinked(drawn[at:], folder, uri)])


def each_member(found: re.Match[str]) -> str:
    """Document the named members one by one. An option that hides the module's docstring would hide theirs as well.

    The keys of typed dictionaries are left out, because they have a page of their own.
    """
    parts: list[str] = []
    for name in found["names"].split(", "):
        keys = ", members: false, inherited_members: false" if name.endswith("Options") else ""
        parts.append(f"::: {found['module']}.{name}\n    options: {{ heading_level: {found['level']}{keys} }}")
    return "\n\n".join(parts)


def weight(uri: str) -> float:
    """Return how early the search shows a page: answers first, then explanations, then what is for contributors."""
    return next((found for begin, found in WEIGHTS.items() if uri.startswith(begin)), 1.0)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page, where they follow the light and dark schemes, and link names of Trio and options."""

    def inlined(found: re.Match[str]) -> str:
        # With directory URLs each page is one folder below the folder of its source, except for index pages.
        folder = (DOCS / page.file.dest_uri).parent
        path = (folder / found["target"]).resolve()
        picture = path.read_text(encoding="utf-8") if path.exists() else "@keyframes"
        return found[0] if "@keyframes" in picture else picture  # recordings keep their own colours and styles

    def linked(found: re.Match[str]) -> str:
        pages = [each for each, names in TRIO_PAGES.items() if found["name"] in names.split()]
        return f'<a href="{TRIO}{pages[0]}.html#trio.{found["name"]}">{found[0]}</a>' if pages else found[0]

    content = TRIO_CODE.sub(linked, IMAGE.sub(inlined, content))
    uri = page.file.src_uri
    if not uri.startswith("reference/api/"):
        return content
    options = posixpath.relpath(OPTIONS_PAGE, posixpath.dirname(page.file.dest_uri)) + "/"
    return OPTIONS_CODE.sub(lambda found: f'<a href="{options}">{found[0]}</a>', content)


# ---------------------------------------------------------------------------- files above docs


@cache
def above() -> dict[Path, str]:
    """Return the files above docs that the site shows, each with the name of its page."""
    found = {path: uri for path, uri in PAGES.items() if path.exists()}
    found |= {path: f"examples/{path.stem}.md" for path in sorted(EXAMPLES.glob("*.py"))}
    found |= {path: f"examples/{path.parent.name}.md" for path in sorted(EXAMPLES.glob("*/README.md"))}
    pages = [*DOCS.rglob("*.md"), *(path for path in found if path.suffix == ".md")]
    for page in sorted(pages):
        for target in targets(page):
            if target.exists() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
                found.setdefault(target, f"source/{target.relative_to(ROOT).as_posix()}.md")
    return found


def targets(page: Path) -> Iterator[Path]:
    """Yield the files to which the links of a page lead."""
    for found in LINK.finditer(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target = found["target"].partition("#")[0]
        if target and "://" not in target:
            yield (page.parent / target).resolve()


def page_of(path: Path) -> str:
    """Write the page that shows a file above docs."""
    if path == EXAMPLES:
        return examples_page()
    uri = above()[path]
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = "\n".join(f"- `{each.relative_to(ROOT).as_posix()}`" for each in sorted(path.rglob("*.py")))
        return f"# {name}\n\n{files}\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md" and not uri.startswith("source/"):
        return text
    title = path.name if uri.startswith("examples/") else name
    head = f"# {'Licence' if path.name == 'LICENSE' else title}\n\n"
    if path.suffix == ".py":
        head += f"{first_line(path)}\n\n"
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def examples_page() -> str:
    """List the examples, each with the first sentence of its module or page."""
    rows = [(path.name, path.name, first_line(path)) for path in sorted(EXAMPLES.glob("*.py"))]
    rows += [
        (path.parent.name, f"{path.parent.name}/README.md", first_line(path)) for path in EXAMPLES.glob("*/README.md")
    ]
    lines = [f"| [{name}]({target}) | {says} |" for name, target, says in rows]
    return "\n".join(
        ["# Examples", "", "Short programs, each run by the suite.", "", "| program | |", "|---|---|", *lines, ""]
    )


def first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].strip('"# ')


def relinked(text: str, folder: Path, uri: str) -> str:
    """Let the links of a part of a page lead to pages of the site; one to a file that has none is a warning."""

    def lead(found: re.Match[str]) -> str:
        target, mark, heading = found["target"].partition("#")
        if not target or "://" in target:
            return found["target"]
        path = (folder / target).resolve()
        if path.is_relative_to(DOCS):
            there = path.relative_to(DOCS).as_posix()
        elif path in above():
            there = above()[path]
        else:
            log.warning("%s: the link to %r leads to nothing of the project", uri, found["target"])
            return found["target"]
        return posixpath.relpath(there, posixpath.dirname(uri)) + mark + heading

    return LINK.sub(lead, text)


# ---------------------------------------------------------------------------- drawings

WIDTH, HEIGHT, GAP = 130, 40, 190  # of a state's box, and between the left sides of two


def state_diagram(steps: str) -> str:
    """Draw the states in a row: a step to the next one is a straight arrow, one that passes a state is an arc."""
    moves = [found.groups() for found in re.finditer(r"(\S+) --> (\w+)(?:: (.*))?", steps)]
    states = list(dict.fromkeys(name for source, target, _ in moves for name in (source, target) if name != "[*]"))
    at = {name: 20 + GAP * number for number, name in enumerate(states)}
    parts = []
    for name, x in at.items():
        parts.append(f'<rect x="{x}" y="70" width="{WIDTH}" height="{HEIGHT}" rx="8"/>')
        parts.append(f'<text class="state" x="{x + WIDTH / 2}" y="95">{html.escape(name)}</text>')
    for source, target, label in moves:
        if source not in at or target not in at:
            continue
        begin, end = at[source], at[target]
        words = html.escape(label or "")
        if states.index(target) - states.index(source) == 1:
            parts.append(f'<path d="M{begin + WIDTH},90 H{end}" marker-end="url(#tip)"/>')
            lines = words.split(" | ")
            middle = (begin + WIDTH + end) / 2
            for number, line in enumerate(lines):
                parts.append(f'<text x="{middle}" y="{84 if len(lines) == 1 else 124 + 16 * number}">{line}</text>')
        else:
            left, right = begin + WIDTH / 2, end + WIDTH / 2
            parts.append(f'<path d="M{left},70 C{left},14 {right},14 {right},70" marker-end="url(#tip)"/>')
            parts.append(f'<text x="{(left + right) / 2}" y="22">{words}</text>')
    width = GAP * len(states)
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    tip += '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    label = html.escape(", ".join(states))
    return f'<svg class="states" viewBox="0 0 {width} 190" role="img" aria-label="{label}">{tip}{"".join(parts)}</svg>'
