"""Makes README.md the first page of the site: mkdocs takes pages from docs/ only."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add index.md: README.md with links relative to docs/."""
    text = (Path(config.docs_dir).parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files
