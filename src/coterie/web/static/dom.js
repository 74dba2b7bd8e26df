// DOM helpers. Elements are made with createElement and text with textContent only, never with HTML.

export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === 'class') el.className = value;
    else if (key === 'text') el.textContent = value;
    else if (key.startsWith('on')) el.addEventListener(key.slice(2), value);
    else if (key === 'data') Object.assign(el.dataset, value);
    else if (key in el && typeof value !== 'string') el[key] = value;
    else el.setAttribute(key, value === true ? '' : value);
  }
  el.append(...some(children));
  return el;
}

const some = (children) => children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);

/** The same for SVG elements. */
export function s(tag, attributes, ...children) {
  const el = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** An icon, by the id of its symbol in index.html. */
export const icon = (name) => s('svg', { class: 'icon', 'aria-hidden': 'true' }, s('use', { href: `#i-${name}` }));

export const fileIcon = (type) => icon(type === 'image' || type === 'audio' ? type : 'file');

export const button = (props, ...children) => h('button', { type: 'button', ...props }, ...children);

export const iconButton = (name, label, props = {}) =>
  button({ ...props, class: `icon-btn ${props.class ?? ''}`, 'aria-label': label, title: label }, icon(name));

const nameOf = (el) => el.dataset.of ?? el.dataset.agent ?? el.getAttribute('href') ?? el.ariaLabel ?? el.textContent;

/** Replaces the children. Keeps the focus, or moves it to the element at the same position. */
export const fill = (el, ...children) => keepFocus(el, () => el.replaceChildren(...some(children)));

/** Makes the children like the new ones. What is equal stays: a press on a replaced element would not become a click. */
export const sync = (el, ...children) => keepFocus(el, () => syncChildren(el, some(children)));

function syncChildren(el, fresh) {
  const keyOf = (one, at) => one.dataset?.key ?? `${at} ${one.nodeName}`;
  const old = new Map([...el.childNodes].map((one, at) => [keyOf(one, at), one]));
  const next = fresh.map((one) => (typeof one === 'string' ? document.createTextNode(one) : one)).map((one, at) => {
    const before = old.get(keyOf(one, at));
    old.delete(keyOf(one, at)); // of two with the same key the second one is new
    return like(before, one);
  });
  const stay = new Set(next);
  for (const one of [...el.childNodes]) if (!stay.has(one)) one.remove();
  next.forEach((one, at) => el.childNodes[at] !== one && el.insertBefore(one, el.childNodes[at] ?? null));
}

/** Makes an element like a new one and returns it; its listeners stay. Without such an element, returns the new one. */
export function like(el, fresh) {
  if (el?.nodeName !== fresh.nodeName || el === fresh) return fresh;
  if (el.isEqualNode(fresh)) return el;
  if (!el.attributes) el.data = fresh.data;
  else {
    const isKept = (name) => name === 'open'; // the person opens and closes details
    for (const { name } of [...el.attributes]) if (!fresh.hasAttribute(name) && !isKept(name)) el.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (!isKept(name)) setAttr(el, name, value);
    syncChildren(el, [...fresh.childNodes]);
  }
  return el;
}

/** Keeps the focus in `el` while its content changes, or moves it to the element at the same position. */
export function keepFocus(el, change) {
  const had = document.activeElement;
  const inside = had !== el && el.contains(had);
  const at = inside ? [...el.querySelectorAll(had.localName)].indexOf(had) : -1;
  change();
  if (!inside || document.activeElement === had) return el;
  const now = [...el.querySelectorAll(had.localName)];
  (el.contains(had) ? had : now.find((one) => nameOf(one) === nameOf(had)) ?? now[Math.min(at, now.length - 1)])?.focus({ preventScroll: true });
  return el;
}

/** Reads a boolean setting of this browser; with `yes`, stores it first. */
export const flag = (name, yes) => (yes === undefined ? localStorage.getItem(`coterie.${name}`) === '1' : localStorage.setItem(`coterie.${name}`, yes ? '1' : '0'));

export const toComposer = (how) => document.getElementById('composer')?.focus(how);

/** Scrolls a box by the smallest distance that makes an element visible. */
export function reveal(el, box) {
  const [has, wants] = [box.getBoundingClientRect(), el.getBoundingClientRect()];
  box.scrollTop += Math.min(0, wants.top - has.top) + Math.max(0, wants.bottom - has.bottom);
}

export const TINTS = ['teal', 'blue', 'violet', 'pink', 'red', 'orange', 'green', 'grey'];

/** The first letters of a name: of two words if they have letters with cases, else the first sign. */
function initialsOf(name) {
  const words = (name.match(/[\p{L}\p{N}]+/gu) ?? [name.trim()]).map((word) => [...word][0] ?? '');
  return (/\p{Lu}|\p{Ll}/u.test(words[0]) ? words.slice(0, 2).join('') : words[0]).toUpperCase();
}

/** An agent's initials in its colour. `size`: small, row or large; `sign`: an element in its corner. */
export const avatar = ({ id = '', name = '', colour, initials }, { size = 'row', sign = null } = {}) =>
  h('span', { class: `avatar avatar-${size} tint-${colour ?? TINTS[[...(id || name)].reduce((sum, sign) => sum + sign.codePointAt(0), 0) % TINTS.length]}`, 'aria-hidden': 'true' }, initials || initialsOf(name || id) || '·', sign);

/** Placeholder of an empty list. */
export const empty = (text, ...more) => h('div', { class: 'empty' }, h('p', { text }), more);

/** Sets the text only if it changed, to avoid a layout. */
export function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}

export function setAttr(el, name, value) {
  if (value === null || value === undefined || value === false) el.removeAttribute(name);
  else if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value === true ? '' : value);
}
