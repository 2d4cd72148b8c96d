"""What can be measured of how the panel looks: contrast, overflow, overlaps, and what axe-core finds.

Each function takes the panel's locator and returns what is wrong, as lines of text: [] is well.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

from tools import page_parts

# WCAG 2.1, 1.4.3 (AA) for text of ordinary size: https://www.w3.org/TR/WCAG21/#contrast-minimum
LEAST_CONTRAST = 4.5
# Pixels by which two boxes may share an edge, or text may reach over its box, by rounding.
SLACK = 1
# Elements that can be seen, in the order of the document. What is clipped to a pixel is for screen readers.
_VISIBLE = """const visible = element => {
    const box = element.getBoundingClientRect()
    return box.width > 2 && box.height > 2 && element.checkVisibility({opacityProperty: true, visibilityProperty: true})
}
const own = element => [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE)
    .map(node => node.data).join(' ').replace(/\\s+/g, ' ').trim()
const shown = root => [root, ...root.querySelectorAll('*')].filter(visible)
const named = element => `${element.dataset.testid ?? element.className ?? ''} <${element.localName}> "${own(element)}"`
"""
# Computed colours may be color(srgb ...), and backgrounds lie over each other: a canvas does that sum. Its pixels
# are 8 bits of sRGB; the formulas are those of https://www.w3.org/TR/WCAG21/#dfn-relative-luminance
_CONTRAST = (
    "(root, least) => {"
    + _VISIBLE
    + """
    const pen = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true})
    const over = colours => {
        pen.clearRect(0, 0, 1, 1)
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1) }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3)
    }
    const luminance = pixel => {
        const [r, g, b] = pixel.map(value => value / 255)
            .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const grounds = element => {
        const found = []
        for (let one = element; one; one = one.parentElement) found.unshift(getComputedStyle(one).backgroundColor)
        return ['white', ...found]
    }
    const wrong = []
    for (const element of shown(root)) {
        if (!own(element)) continue
        const behind = grounds(element), text = getComputedStyle(element).color
        const [light, dark] = [luminance(over([...behind, text])), luminance(over(behind))].sort((a, b) => b - a)
        const contrast = (light + 0.05) / (dark + 0.05)
        if (contrast < least) wrong.push(`${contrast.toFixed(2)}: ${named(element)}`)
    }
    return wrong
}"""
)
_OVERFLOW = (
    "(root, slack) => {"
    + _VISIBLE
    + """
    const edge = root.getBoundingClientRect()
    return shown(root).flatMap(element => {
        const box = element.getBoundingClientRect(), scrolls = getComputedStyle(element).overflowX
        const out = box.right > edge.right + slack || box.left < edge.left - slack
        const wide = element.scrollWidth > element.clientWidth + slack && element.clientWidth > 0
            && !['auto', 'scroll', 'hidden', 'clip'].includes(scrolls) && getComputedStyle(element).display !== 'inline'
        // A line that is cut off has to be readable in another way.
        const cut = element.scrollWidth > element.clientWidth + slack && ['hidden', 'clip'].includes(scrolls)
            && own(element) && !element.title
        return [out && 'outside', wide && 'too wide', cut && 'cut off without a title'].filter(Boolean)
            .map(what => `${what}: ${named(element)}`)
    })
}"""
)
_OVERLAPS = (
    "(root, slack) => {"
    + _VISIBLE
    + """
    const leaves = shown(root).filter(element => own(element) || ['button', 'progress', 'svg', 'select']
        .includes(element.localName)).filter(element => !element.closest('svg') || element.localName === 'svg')
    const wrong = []
    leaves.forEach((one, index) => {
        for (const other of leaves.slice(index + 1)) {
            if (one.contains(other) || other.contains(one)) continue
            // By line: an inline element that wraps has boxes, and its bounding box is over its neighbours.
            const hit = [...one.getClientRects()].some(a => [...other.getClientRects()].some(b =>
                Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > slack))
            if (hit) wrong.push(`${named(one)} and ${named(other)}`)
        }
    })
    return wrong
}"""
)
_TEXTS = (
    "root => {"
    + _VISIBLE
    + """
    const found = shown(root).flatMap(element => [own(element), element.title, element.getAttribute('aria-label')])
    return [...new Set(found.filter(Boolean))]
}"""
)
_AXE = """async root => (await axe.run(root, {resultTypes: ['violations']})).violations.flatMap(
    found => found.nodes.map(node => `${found.id} (${found.impact}): ${node.failureSummary} ${node.html.slice(0, 160)}`)
)"""


def weak_contrast(panel: Locator) -> list[str]:
    """Text with less contrast than 4.5 to what is behind it."""
    return _lines(panel, _CONTRAST, LEAST_CONTRAST)


def overflow(panel: Locator) -> list[str]:
    """What reaches out of the panel sideways, is wider than its box, or is cut off and has no title that tells."""
    return _lines(panel, _OVERFLOW, SLACK)


def overlaps(panel: Locator) -> list[str]:
    """Texts and controls that lie over each other."""
    return _lines(panel, _OVERLAPS, SLACK)


def texts(panel: Locator) -> list[str]:
    """Every text that a person sees or a screen reader says, titles included."""
    return [str(one) for one in panel.evaluate(_TEXTS)]


def axe_violations(panel: Locator) -> list[str]:
    """What axe-core has against the panel, by its own choice of rules."""
    if not panel.page.evaluate("() => Boolean(window.axe)"):
        panel.page.evaluate(page_parts.axe_core().read_text(encoding="utf-8"))
    return [str(one) for one in panel.evaluate(_AXE)]


def _lines(panel: Locator, script: str, argument: Any) -> list[str]:
    return [str(one) for one in panel.evaluate(script, argument)]
