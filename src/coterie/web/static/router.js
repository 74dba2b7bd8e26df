// Routing: the part of the address after `#/` names the screen.
//
// A screen is registered under the first part of its path:
//
//   screen('inbox', { title: () => t('inbox'), load: () => import('./screens/inbox.js') })
//
// Its module exports `render(root, {args, query, compact})`, which fills `root` and may return a function that is
// called when the screen is left. `compact` is true inside the inspector, where the same module may be shown as a panel.

import { button, empty, fill } from './dom.js';
import { t } from './i18n.js';

const screens = new Map();
let shown = (_route, _screen) => null;
let leave = null;
let turn = 0;

export const screen = (name, what) => screens.set(name, what);
export const screenNamed = (name) => screens.get(name);

/** The part of the address after `#/`: the name of a screen, its arguments and its query. */
export function route(hash = location.hash) {
  const [path, search = ''] = hash.replace(/^#\/?/, '').split('?');
  const [name = '', ...args] = path.split('/').map(decode);
  return { name, args, query: new URLSearchParams(search) };
}

let own = 0; // changes of the address whose event is still to come

/** Opens a screen at once, so that the next key press is already for it. */
export function go(path) {
  if (location.hash !== path) {
    own += 1;
    location.hash = path;
  }
  return show();
}

/** The path of a conversation, optionally at one message. Notices of the system that concern no agent are about undelivered messages. */
export const agentPath = (id, message) => id === 'system' ? '#/dead' : `#/a/${encodeURIComponent(id)}` + (message ? `?m=${encodeURIComponent(message)}` : '');

/** `frame(route, screen)` returns the element to show the screen in. */
export function start(frame) {
  shown = frame;
  addEventListener('hashchange', () => {
    if (own) own -= 1;
    else show();
  });
  return show();
}

export async function show() {
  const mine = (turn += 1);
  const at = route();
  const what = screens.get(at.name) ?? screens.get('');
  const module = what.render ? what : await what.load().catch(() => ({ render: (root) => missed(root, what, show) }));
  if (mine !== turn) return;
  leave?.();
  leave = null;
  const root = shown(at, what);
  leave = module.render(root, { args: at.args, query: at.query, compact: false }) ?? null;
}

/** Shown if a screen's script could not be loaded. If the server answers, the page is older than the server. */
export function missed(root, what, again) {
  const retry = async () => {
    const answers = () => fetch('/', { cache: 'no-store' }).then(({ ok }) => ok, () => false);
    if (await what.load().then(() => false, answers)) location.reload();
    else again();
  };
  fill(root, empty(t('scriptMissed'), button({ class: 'plain-btn', onclick: retry }, t('retry'))));
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
