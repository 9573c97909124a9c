"""Makes README.md the first page of the site: mkdocs takes pages from docs/ only. After `make playground`, it
has the playground, and so has the page of the schedules. Names the version."""

import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PLAYGROUND = ROOT / "build" / "playground"
PLACES = {
    "index.md": r"!\[above:.*?\n\n\*Simulated: two.*?\*\n",
    "reference/schedules.md": r"(?=\| `schedule.name`)",
}
"""The part of a page in whose place the playground stands."""
FRAME = '<iframe class="playground" src="{up}playground/index.html" title="playground"></iframe>\n\n'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version at the foot of each page."""
    source = (ROOT / "src" / "tailrace" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found, "no version"
    config.copyright = f"tailrace {found[1]}, Apache-2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add index.md: README.md with links relative to docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the playground in its places, if it has been built."""
    name = page.file.src_uri
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
