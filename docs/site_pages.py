"""Copy the pages to build/pages/en and build/pages/zh, from which mkdocs builds the site: `make docs`.

The README becomes the first page, and each code of a message has one. Links that work in the files of the repository
are changed to work on the site.

    python docs/site_pages.py --translations

lists the Chinese pages that are missing, and those whose English page was changed since, by the dates of git.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
FROM_ROOT = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
CHINESE = ".zh-CN.md"
MESSAGES = ROOT / "src" / "lockstep" / "explanations"
TITLES = {
    ".md": "# Messages and their codes\n\nMessages end with a code. `lockstep explain CODE` shows its page.",
    CHINESE: "# 消息与代码\n\n消息以代码结尾。在终端里 `lockstep explain --zh 代码` 显示它的说明页。",
}
HEADS = {".md": "| code | mistake |", CHINESE: "| 代码 | 错误 |"}
NOT_PAGES = r"(?:\.\./)*(?:src|examples|tests|benchmarks|LICENSE|pyproject)[^)]*"
# Of a Chinese page the link to the English one, and the other way round: the site has a switch for that.
OTHER_LANGUAGE = re.compile(r"^\[(?:中文|中文说明|English)\]\([^)]*\)\n\n", re.MULTILINE)

# A message's line that was broken in the file; the site wraps it where the window ends.
LONG_LINE = re.compile(r"(?<=[^\n]{90})\n(?=\w)")
TABLE = re.compile(r"<table>\s*<thead>(.*?)</thead>.*?</table>", re.DOTALL)
MANY = 6  # columns
CODE = re.compile(r'<div class="language-\w+ highlight">.*?</pre></div>', re.DOTALL)
DRAWN = re.compile(r"┏|(?:\S {3,}(?=\S)[^\n]*?){4}")
# HTML shows a line break as a space, and Chinese is written without spaces.
BREAK_IN_CHINESE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n *(?=[\u3000-\u9fff\uff00-\uffef])")


def sources() -> dict[str, str]:
    """Return the text of each page by its name in docs/, the pages of the repository's root among them."""
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)): path.read_text(encoding="utf-8") for path in docs.rglob("*.md")}
    for source, page in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        pages[page] = text.replace("](docs/", "](")
    return pages | pages_of_messages()


def pages_of_messages() -> dict[str, str]:
    """Return the page of each code of a message, and a table of them in each language."""
    pages = {}
    for suffix, title in TITLES.items():
        files = sorted((MESSAGES / "zh" if suffix == CHINESE else MESSAGES).glob("LS???.md"))
        texts = {f"{path.stem}{suffix}": path.read_text(encoding="utf-8") for path in files}
        titles = re.compile(r"^##? (LS\d{3}): (.*)$", re.MULTILINE)  # neighbours share a page
        rows = sorted((code, name, mistake) for name, text in texts.items() for code, mistake in titles.findall(text))
        table = "\n".join(f"| [{code}](messages/{name}) | {mistake} |" for code, name, mistake in rows)
        heading = title.partition("\n")[0].removeprefix("# ")
        pages[f"messages{suffix}"] = f"{title}\n\n{HEADS[suffix]}\n| --- | --- |\n{table}\n"
        for name, text in texts.items():
            linked = re.sub(r"docs/([\w/-]+)((?:\.zh-CN)?\.md)", r"[\1](../\1\2)", text)
            pages[f"messages/{name}"] = f"{LONG_LINE.sub(' ', linked)}\n[{heading}](../messages{suffix})\n"
    return pages


def translations() -> dict[Path, Path]:
    """Return the Chinese page, or where it would be, of each English page."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    of_docs = {page: page.with_name(page.name.replace(".md", CHINESE)) for page in pages if CHINESE not in page.name}
    return of_docs | {page: MESSAGES / "zh" / page.name for page in MESSAGES.glob("LS???.md")}


def list_translations() -> list[str]:
    """Return a line for each Chinese page that is missing, or older than the English one."""
    log = ["git", "log", "--format=format:@%ct", "--name-only", "--no-renames"]
    changed: dict[str, int] = {}
    seconds = 0
    shown = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    for line in shown.stdout.splitlines():
        if line.startswith("@"):
            seconds = int(line[1:])
        elif line:
            changed.setdefault(line, seconds)  # the newest comes first
    found = []
    for english, chinese in sorted(translations().items()):
        name, other = str(english.relative_to(ROOT)), str(chinese.relative_to(ROOT))
        if not chinese.exists():
            found.append(f"{name} is not translated")
        elif changed.get(name, 0) > changed.get(other, 0):
            found.append(f"{name} was changed after {other}")
    return found


def as_on_the_site(text: str) -> str:
    """Return a page's text as the site shows it."""
    text = OTHER_LANGUAGE.sub("", text, count=1)
    for source, page in FROM_ROOT.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({page}", text)
    return re.sub(rf"\[([^\]\[]+)\]\({NOT_PAGES}\)", r"\1", text)


def in_chinese(text: str) -> str:
    """Return a Chinese page with links to Chinese pages, and to the English site where there is only an English one."""
    text = re.sub(r"\]\((?!https?:)([\w./-]+)(?<!\.zh-CN)\.md(#[^)]*)?\)", r"](../\1.html\2)", text)
    return BREAK_IN_CHINESE.sub("", text.replace(".zh-CN.md", ".md"))


def write(folder: Path, pages: dict[str, str]) -> None:
    """Write pages and the pictures of docs/ to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "*.md", "theme"))
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def on_page_context(context: dict[str, Any], page: Any, config: Any, **_: Any) -> dict[str, Any]:
    """Name the page's address in each language, for the switch in the header; mkdocs calls this (`hooks`)."""
    ours = Path(config.docs_dir).name
    theirs = "zh" if ours == "en" else "en"
    address = page.url if (PAGES / theirs / page.file.src_uri).exists() else "index.html"
    root = "../" * page.url.count("/")
    context["alternates"] = {ours: root + page.url, theirs: root + ("zh/" if theirs == "zh" else "../") + address}
    return context


def on_page_content(html: str, **_: Any) -> str:
    """Mark what the style sheet treats apart: tables of many columns, and tables drawn with characters."""

    def marked(found: re.Match[str]) -> str:
        return f'<div class="wide">{found[0]}</div>' if found[1].count("<th") >= MANY else found[0]

    html = TABLE.sub(marked, html)
    return CODE.sub(lambda found: f'<div class="drawn">{found[0]}</div>' if DRAWN.search(found[0]) else found[0], html)


def main() -> None:
    """Write all pages anew."""
    pages = {name: as_on_the_site(text) for name, text in sources().items()}
    listed = "\n".join(f"- {line}" for line in list_translations())
    pages["translations.md"] = f"# Translations to do\n\n{listed or 'None: every page is there in Chinese.'}\n"
    write(PAGES / "en", {name: text for name, text in pages.items() if not name.endswith(CHINESE)})
    chinese = {name: in_chinese(text) for name, text in pages.items() if name.endswith(CHINESE)}
    write(PAGES / "zh", {name.replace(CHINESE, ".md"): text for name, text in chinese.items()})


if __name__ == "__main__":
    if "--translations" in sys.argv[1:]:
        sys.stdout.writelines(f"{line}\n" for line in list_translations())
    else:
        main()
