"""The pages: links lead somewhere, examples are Python, and the Chinese pages have what the English ones have."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that GitHub and the site give to headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", without_code(page)):
        file = (page.parent / target).resolve() if target else page
        if target.startswith(("http://", "https://")):
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_python_example_can_be_read_by_python(page: Path) -> None:
    for language, code in blocks(page):
        if language == "python":
            ast.parse(code)


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_the_chinese_page_has_what_the_english_one_has(page: Path) -> None:
    def structure(path: Path) -> dict[str, int]:
        text = without_code(path)
        patterns = {"headings": r"^#+ ", "rows of tables": r"^\|", "items of lists": r"^ *(?:-|\d+\.) "}
        return {what: len(re.findall(pattern, text, re.MULTILINE)) for what, pattern in patterns.items()}

    english = page.with_name(page.name.replace(".zh-CN.", "."))
    assert structure(page) == structure(english)
    assert [language for language, _ in blocks(page)] == [language for language, _ in blocks(english)]
