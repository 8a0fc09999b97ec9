"""Checks that every relative link in the project's Markdown points at a file, and at a heading of it where it names one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as forges spell them."""
    titles = (title.lower() for title in HEADING.findall(FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """What does not resolve, one line each."""
    found = []
    for target in LINK.findall(INLINE_CODE.sub("", FENCE.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue  # the outside world is not checked
        path, _, anchor = target.partition("#")
        aim = (page.parent / unquote(path)) if path else page
        if not aim.exists():
            found.append(f"{page}: {target}: no such file")
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim.read_text()):
            found.append(f"{page}: {target}: no such heading")
    return found


def main() -> int:
    """Check all pages; 1 where a link is broken."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", "*.md"], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    pages = [Path(name) for name in listed if name and Path(name).exists()]
    problems = [line for page in pages for line in broken(page)]
    print("\n".join(problems) or f"{len(pages)} pages, all links resolve")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
