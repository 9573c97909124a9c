"""Makes README.md the first page of the site, and pages of the files of examples/ to which pages link: mkdocs
takes pages from docs/ only. After `make playground`, the first page and the page of the schedules have the
playground. Names the version."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests of this file need no mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PLAYGROUND = ROOT / "build" / "playground"
PLACES = {
    "index.md": r"!\[above:.*?\n\n\*Simulated: two.*?\*\n",
    "reference/schedules.md": r"(?=\| `schedule.name`)",
}
"""The part of a page in whose place the playground stands."""
EXAMPLE = re.compile(r"\]\((?:\.\./)*(examples/[^)#]+)")
"""A link of a page to a file outside docs/; its group is the file."""
FRAME = '<iframe class="playground" src="{up}playground/index.html" title="playground"></iframe>\n\n'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version at the foot of each page."""
    source = (ROOT / "src" / "tailrace" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found, "no version"
    config.copyright = f"tailrace {found[1]}, Apache-2.0"
    return config


def first_page() -> str:
    """README.md with links relative to docs/."""
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")


def page_of(example: str) -> str:
    """The page that shows a file of examples/."""
    return example if example.endswith(".md") else f"{example}.md"


def example_pages(texts: Iterable[str]) -> dict[str, str]:
    """The pages of the files of examples/ that some pages link to, by name: their content."""
    pages = {}
    for example in sorted({name for text in texts for name in EXAMPLE.findall(text)}):
        text = (ROOT / example).read_text(encoding="utf-8")
        is_page = example.endswith(".md")
        pages[page_of(example)] = text if is_page else f"# {example}\n\n````python\n{text}````\n"
    return pages


def with_example_pages(markdown: str, name: str) -> str:
    """The text of a page, with links to the pages of examples in place of the files."""
    return EXAMPLE.sub(lambda link: f"]({'../' * name.count('/')}{page_of(link[1])}", markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add index.md, and the files of examples/ that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    files.append(File.generated(config, "index.md", content=first_page()))
    pages = example_pages([each.content_string for each in files.documentation_pages()])
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link to the pages of examples. Put the playground in its places, if it has been built."""
    name = page.file.src_uri
    markdown = with_example_pages(markdown, name)
    if name not in PLACES or not (PLAYGROUND / "first.json").exists():
        return markdown
    frame = FRAME.format(up="../" * name.count("/"))
    text, number = re.subn(PLACES[name], frame, markdown, count=1, flags=re.DOTALL)
    assert number, f"{name} has no place for the playground"
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the playground into the site."""
    if (PLAYGROUND / "first.json").exists():
        shutil.copytree(PLAYGROUND, Path(config.site_dir) / "playground", dirs_exist_ok=True)
