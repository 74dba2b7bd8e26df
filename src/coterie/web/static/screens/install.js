// What an installed page has: a service worker, and the number of unread messages in the icons of the tab and the app.

import { s } from '../dom.js';
import { go } from '../router.js';
import { on, unreadTotal, upTo99 } from '../state.js';

const ICON = '/static/icon.svg';
let shown = 0;

export function start() {
  on(['unread', 'snapshot'], paint);
  paint();
  // Browsers have service workers on https and on this machine only.
  if (!navigator.serviceWorker) return;
  const policy = globalThis.trustedTypes?.createPolicy('coterie-worker', { createScriptURL: (url) => (url === '/sw.js' ? url : '') });
  navigator.serviceWorker.register(/** @type {string} */ (policy?.createScriptURL('/sw.js') ?? '/sw.js')).catch(() => {}); // the page works without it
  navigator.serviceWorker.addEventListener('message', ({ data }) => data?.open && go(data.open.replace(/^\//, '')));
}

async function paint() {
  const n = unreadTotal();
  if (n === shown) return;
  shown = n;
  if (n) navigator.setAppBadge?.(n).catch(() => {});
  else navigator.clearAppBadge?.().catch(() => {});
  const link = /** @type {HTMLLinkElement} */ (document.querySelector('link[rel="icon"]'));
  link.href = n ? badged(upTo99(n)) : ICON;
}

/** The icon with a number, as a data URL. */
function badged(text) {
  const dots = [[16, 9, '#0b6e5f'], [8, 22, '#2a9d8a'], [24, 22, '#6fb7a8']].map(([cx, cy, fill]) => s('circle', { cx, cy, r: 5, fill }));
  const number = s('text', { x: 21, y: 26, 'text-anchor': 'middle', 'font-family': 'sans-serif', 'font-weight': 700, 'font-size': text.length > 2 ? 10 : 14, fill: '#fff' });
  number.textContent = text;
  const svg = s('svg', { viewBox: '0 0 32 32' }, ...dots, s('circle', { cx: 21, cy: 21, r: 11, fill: '#b3261e' }), number);
  return `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
}
