// Elements by createElement, text by textContent: there is no other way into the page.

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
  el.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return el;
}

const SVG = 'http://www.w3.org/2000/svg';
const ICONS = {
  menu: 'M4 6h16M4 12h16M4 18h16',
  search: 'M11 4a7 7 0 1 0 0 14a7 7 0 0 0 0-14zM16 16l4.5 4.5',
  gear: 'M12 9a3 3 0 1 0 0 6a3 3 0 0 0 0-6zM19 12l2-1.2l-2-3.5l-2.2 1a7 7 0 0 0-1.8-1L14.7 5h-5.4L9 7.3a7 7 0 0 0-1.8 1l-2.2-1l-2 3.5L5 12a7 7 0 0 0 0 0l-2 1.2l2 3.5l2.2-1a7 7 0 0 0 1.8 1l.3 2.3h5.4l.3-2.3a7 7 0 0 0 1.8-1l2.2 1l2-3.5z',
  stop: 'M7 7h10v10H7z',
  plus: 'M12 5v14M5 12h14',
  send: 'M5 12h13M12 5l7 7l-7 7',
  close: 'M6 6l12 12M18 6L6 18',
  down: 'M12 5v14M6 13l6 6l6-6',
  side: 'M4 5h16v14H4zM15 5v14',
  theme: 'M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16',
  help: 'M9 9.5a3 3 0 1 1 4.2 2.7c-.8.4-1.2.9-1.2 1.8M12 17.4v.2M12 3a9 9 0 1 0 0 18a9 9 0 0 0 0-18z',
  file: 'M7 3h7l4 4v14H7zM14 3v4h4',
  image: 'M4 5h16v14H4zM4 16l5-5l4 4l3-3l4 4M15.5 9v.1',
  audio: 'M9 18V6l10-2v12M9 18a2.5 2.5 0 1 1-5 0a2.5 2.5 0 0 1 5 0zM19 16a2.5 2.5 0 1 1-5 0a2.5 2.5 0 0 1 5 0z',
  text: 'M5 6h14M12 6v13',
  clock: 'M12 7v5l3.5 2M12 3a9 9 0 1 0 0 18a9 9 0 0 0 0-18z',
  inbox: 'M4 13l3-8h10l3 8v6H4zM4 13h5l1.5 3h3L15 13h5',
  star: 'M12 4l2.4 5l5.6.7l-4.1 3.9l1 5.5L12 16.4l-4.9 2.7l1-5.5L4 9.7L9.6 9z',
  tree: 'M12 4v6M6 20v-5h12v5M12 10v5M10 4h4M4 20h4M16 20h4',
  list: 'M8 6h12M8 12h12M8 18h12M4 6h.1M4 12h.1M4 18h.1',
  box: 'M4 8l8-4l8 4v8l-8 4l-8-4zM4 8l8 4l8-4M12 12v8',
  check: 'M5 12.5l4.5 4.5L19 7.5',
  reply: 'M9 7l-5 5l5 5M4 12h9a6 6 0 0 1 6 6',
  copy: 'M9 9h10v11H9zM5 15V4h10',
  tool: 'M14.5 6a4 4 0 0 0-5 5L4 16.5L7.5 20L13 14.5a4 4 0 0 0 5-5l-2.5 2.5l-3-3z',
};

export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  const path = document.createElementNS(SVG, 'path');
  path.setAttribute('d', ICONS[name] ?? ICONS.file);
  svg.setAttribute('viewBox', '0 0 24 24');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  svg.append(path);
  return svg;
}

export const button = (props, ...children) => h('button', { type: 'button', ...props }, ...children);

export const iconButton = (name, label, props = {}) =>
  button({ ...props, class: `icon-btn ${props.class ?? ''}`.trim(), 'aria-label': label, title: label }, icon(name));

export const fill = (el, ...children) => {
  el.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return el;
};

/** Sets text only where it changed: an untouched node costs no layout. */
export function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}

export function setAttr(el, name, value) {
  if (value === null || value === undefined || value === false) el.removeAttribute(name);
  else if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value === true ? '' : value);
}
