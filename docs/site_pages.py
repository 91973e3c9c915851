"""Copy the pages to build/pages/en and build/pages/zh, from which mkdocs builds the site: `make docs`.

The README becomes the first page, and each code of a message has one. Links that work in the files of the repository
are changed to work on the site.
"""

import re
import shutil
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
        texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(MESSAGES.glob(f"LS???{suffix}"))}
        rows = [text.partition("\n")[0].removeprefix("# ").split(": ", 1) for text in texts.values()]
        table = "\n".join(f"| [{code}](messages/{code}{suffix}) | {mistake} |" for code, mistake in rows)
        heading = title.partition("\n")[0].removeprefix("# ")
        pages[f"messages{suffix}"] = f"{title}\n\n{HEADS[suffix]}\n| --- | --- |\n{table}\n"
        for name, text in texts.items():
            linked = re.sub(r"docs/([\w/-]+)((?:\.zh-CN)?\.md)", r"[\1](../\1\2)", text)
            pages[f"messages/{name}"] = f"{LONG_LINE.sub(' ', linked)}\n[{heading}](../messages{suffix})\n"
    return pages


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


def main() -> None:
    """Write all pages anew."""
    pages = {name: as_on_the_site(text) for name, text in sources().items()}
    write(PAGES / "en", {name: text for name, text in pages.items() if not name.endswith(CHINESE)})
    chinese = {name: in_chinese(text) for name, text in pages.items() if name.endswith(CHINESE)}
    write(PAGES / "zh", {name.replace(CHINESE, ".md"): text for name, text in chinese.items()})


if __name__ == "__main__":
    main()
