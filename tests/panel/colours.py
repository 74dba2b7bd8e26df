"""Scripts for `page.evaluate` that compute effective colours and contrasts."""

from __future__ import annotations

COLOURS = """
  const rgb = text => { const n = (text.match(/[\\d.]+/g) ?? []).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const share = c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * share(r / 255) + .7152 * share(g / 255) + .0722 * share(b / 255);
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  // What is behind the words of an element: every ground up to the page's own, each seen through those before it.
  const groundOf = el => {
    const grounds = [];
    for (let at = el; at; at = at.parentElement) grounds.push(rgb(getComputedStyle(at).backgroundColor));
    return grounds.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const opacityOf = el => {
    let all = 1;
    for (let at = el; at; at = at.parentElement) all *= Number(getComputedStyle(at).opacity);
    return all;
  };
  const inkOf = el => {
    const ink = rgb(getComputedStyle(el).color);
    return over([ink[0], ink[1], ink[2], ink[3] * opacityOf(el)], groundOf(el));
  };
"""
