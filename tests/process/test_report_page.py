"""The page of a real run, in a real browser."""

import json
import re
from pathlib import Path

import pytest
from tests.process import browser, warm
from tests.process.test_train_command import COMMAND, EXAMPLES

# Bokeh draws into shadow roots.
DEEP = """
const deep = (root, selector) => [...root.querySelectorAll(selector)].concat(
  [...root.querySelectorAll("*")].filter((each) => each.shadowRoot).flatMap((each) => deep(each.shadowRoot, selector)));
"""
TIMELINE = "Object.values(Bokeh.index.roots).find((each) => each.model.y_range.factors)"
LONGEST_BAR = f"""(() => {{
const view = {TIMELINE};
view.el.scrollIntoView({{ block: "center" }});
const data = view.model.renderers[0].data_source.data;
const lengths = [...data.right].map((right, n) => right - data.left[n]);
const n = lengths.indexOf(Math.max(...lengths));
const edge = view.el.getBoundingClientRect();
return [edge.left + view.frame.x_scale.compute((data.left[n] + data.right[n]) / 2),
  edge.top + view.frame.y_scale.compute(data.row[n]), data.what[n]];
}})()"""
TIPS = f"""(() => {{ {DEEP}
const tips = deep(document, ".bk-Tooltip").flatMap((each) => deep(each.shadowRoot ?? each, "*"));
return tips.map((each) => each.textContent).join(" ");
}})()"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "digits"
    ended = warm.run([*COMMAND, EXAMPLES / "digits.yaml", "epochs=2", f"run_dir={path}"])
    assert ended.returncode == 0, ended.stderr
    return path


def test_a_training_leaves_its_page(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "finished" in page
    [where] = re.findall(r'<section id="where">(.*?)</section>', page, re.DOTALL)
    assert where.count('class="bar"') == 2
    [forecast] = re.findall(r'<section id="forecast">(.*?)</section>', page, re.DOTALL)
    assert "measured" in forecast


@pytest.mark.skipif(browser.COMMAND is None, reason="needs a browser: make browser")
def test_a_browser_shows_the_page_without_errors(run_dir: Path, tmp_path: Path) -> None:
    with browser.open_browser(tmp_path / "profile") as page:
        page.open(run_dir / "report.html")
        page.wait_until("Object.values(Bokeh?.index?.roots ?? {}).length >= 4")
        assert page.evaluate(f"(() => {{ {DEEP} return deep(document, 'canvas').length }})()") >= 4
        x, y, what = page.evaluate(LONGEST_BAR)
        page.move_mouse(x - 1, y)
        page.move_mouse(x, y)
        page.wait_until(f"{TIPS}.includes({json.dumps(what)})")
        page.evaluate("document.documentElement.lang = 'en'; document.getElementById('language').click()")
        assert page.evaluate("getComputedStyle(document.querySelector('h2 .zh')).display") != "none"
        assert page.evaluate("getComputedStyle(document.querySelector('h2 .en')).display") == "none"
        page.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
        page.wait_until("document.documentElement.scrollWidth <= 390")  # a phone's
        assert page.errors == []
