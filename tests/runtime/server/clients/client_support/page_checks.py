"""Checks of the web page that look at its styles and at the order of its controls."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

LOWEST_CONTRAST = 3.0
"""WCAG 2.2, success criterion 1.4.11, for the boundaries of controls."""

_BORDERS = """
() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = parse(color).map((each) => each / 255).map((each) =>
      each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if ((parse(color)[3] ?? 1) > 0) return color;
    }
    throw new Error('no background');
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    if (!node.checkVisibility() || node.disabled) continue;
    const style = getComputedStyle(node);
    for (const side of ['Top', 'Right', 'Bottom', 'Left']) {
      const color = style[`border${side}Color`];
      if (style[`border${side}Width`] === '0px' || style[`border${side}Style`] === 'none') continue;
      if (parse(color)[3] === 0) continue; // a filled button
      found.push([node.outerHTML.slice(0, 80), contrast(color, behind(node.parentElement))]);
    }
  }
  return found;
}
"""
_FOCUSED = """
() => {
  const node = document.activeElement;
  if (node === document.body) return null;
  const { left, top } = node.getBoundingClientRect();
  const area = node.closest('header, .conversation, .removed, .composer, .panel');
  const scrolled = node === area ? 0 : (area.scrollTop ?? 0);
  return { area: area.className, name: node.getAttribute('aria-label') ?? node.id ?? node.textContent,
           top: node === area ? -1 : Math.round(top + scrolled), left: Math.round(left) };
}
"""
AREAS = ["bar", "conversation", "removed", "composer", "panel"]


def faint_borders(page: Page) -> list[Any]:
    """The visible borders with too little contrast to what is behind them."""
    borders = page.evaluate(_BORDERS)
    assert len(borders) > 10
    return [each for each in borders if each[1] < LOWEST_CONTRAST]


def focus_order(page: Page) -> list[dict[str, Any]]:
    """The controls in the order in which the Tab key reaches them, from the top of the page."""
    page.evaluate("document.activeElement.blur()")
    page.mouse.click(1, 1)
    stops: list[dict[str, Any]] = []
    for _ in range(100):
        page.keyboard.press("Tab")
        stop = page.evaluate(_FOCUSED)
        if stop is None or (stops and stop == stops[0]):
            return stops
        stops.append(stop)
    raise AssertionError("Tab does not leave the page")


def reading_order(stops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same controls by area, then from top to bottom, and from left to right in a row."""
    row = 12  # pixels by which controls of one row differ
    return sorted(stops, key=lambda stop: (AREAS.index(stop["area"]), round(stop["top"] / row), stop["left"]))
