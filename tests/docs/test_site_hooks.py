"""The site: its pages beside those of docs/, and where its links lead. It needs no mkdocs."""

import posixpath
import re
from pathlib import Path

from site_hooks import example_pages, first_page, with_example_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def test_each_relative_link_of_the_site_leads_to_a_page_or_picture_of_it() -> None:
    texts = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    texts["index.md"] = first_page()
    examples = example_pages(texts.values())
    pages = {name: with_example_pages(text, name) for name, text in texts.items()} | examples
    dead = []
    for name, text in pages.items():
        for link in LINK.findall(re.sub(r"^(````?)\w*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
            is_picture = target.endswith((".png", ".svg")) and (DOCS / target).is_file()
            if target not in pages and not is_picture:
                dead.append(f"{name}: {link}")
    assert dead == []
    assert {"examples/nano.py.md", "examples/loop.py.md", "examples/gsm8k/README.md"} <= examples.keys()
    assert (ROOT / "examples/nano.py").read_text() in examples["examples/nano.py.md"]
    assert "(../examples/nano.py.md)" in pages["why/architecture.md"]
