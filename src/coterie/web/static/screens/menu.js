// A menu of actions at a button. Arrow keys move, letters search, Escape and Tab close; the focus goes back to the button.

import { button, h, icon } from '../dom.js';
import { styled } from './parts.js';

await styled('/static/screens/menu.css');

/** `items`: `{label, run, sign, danger, href, download}`, or null for a line. Returns a function that closes the menu. */
export function openMenu(anchor, label, items) {
  document.querySelector('.menu')?.remove();
  const entries = items.filter((one) => one !== false && one !== undefined);
  const menu = h('div', { class: 'menu', role: 'menu', 'aria-label': label, tabindex: '-1' }, entries.map((one) => one === null ? h('div', { class: 'menu-line', role: 'separator' }) : entry(one)));
  const rows = () => [...menu.querySelectorAll('[role=menuitem]')];

  function entry({ label: text, run, sign, danger, href, download }) {
    const props = { class: `menu-item ${danger ? 'danger' : ''}`, role: 'menuitem', tabindex: '-1', onclick: () => {
      close(!href);
      run?.();
    } };
    const inside = [sign ? icon(sign) : h('span', { class: 'icon' }), h('span', {}, text)];
    return href ? h('a', { ...props, href, download }, inside) : button(props, inside);
  }

  function close(refocus = true) {
    if (!menu.isConnected) return;
    const had = menu.contains(document.activeElement);
    off.abort();
    menu.remove();
    anchor.setAttribute('aria-expanded', 'false');
    if (refocus && had) anchor.focus({ preventScroll: true });
  }

  function keys(event) {
    const { key } = event;
    const all = rows();
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: (at + 1) % all.length, ArrowUp: (at - 1 + all.length) % all.length, Home: 0, End: all.length - 1 }[key];
    if (to !== undefined) all[to].focus();
    else if (key === 'Escape' || key === 'Tab') close();
    else if (key.length === 1 && key !== ' ' && !event.ctrlKey && !event.metaKey && !event.altKey) {
      [...all.slice(at + 1), ...all.slice(0, at + 1)].find((one) => one.textContent.trim().toLowerCase().startsWith(key.toLowerCase()))?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  const off = new AbortController();
  menu.addEventListener('keydown', keys);
  addEventListener('pointerdown', (event) => !menu.contains(event.target) && !anchor.contains(event.target) && close(false), { signal: off.signal, capture: true });
  for (const type of ['resize', 'hashchange', 'blur']) addEventListener(type, () => close(false), off);
  (anchor.closest('main, header, nav, aside') ?? document.body).append(menu);
  position(menu, anchor);
  anchor.setAttribute('aria-expanded', 'true');
  rows()[0]?.focus({ preventScroll: true });
  return close;
}

/** Below the button if there is enough space, else above it; within the window. */
function position(menu, anchor) {
  const at = anchor.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  const below = at.bottom + 4 + height <= innerHeight - 8;
  menu.style.top = `${Math.max(8, below ? at.bottom + 4 : at.top - 4 - height)}px`;
  menu.style.left = `${Math.max(8, Math.min(at.right - width, innerWidth - 8 - width))}px`;
}
