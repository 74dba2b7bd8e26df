// "While you were away": shown above the screen when the person comes back after ten minutes or more.
//
// The time of the last activity is shared by all tabs of this browser. So is the card: it stays until it is closed in one of them.

import { query } from '../api.js';
import { h, iconButton } from '../dom.js';
import { dayAndTime, many, t } from '../i18n.js';
import { agentPath } from '../router.js';
import { region, small } from '../shell.js';
import { nameOf, now, on, unmarked } from '../state.js';
import { taskPath, taskWords } from '../task_line.js';
import { stateTag } from './tasks.js';
import './parts.js';

const SEEN = 'coterie.seenAt'; // server time at which a tab was last visible
const SINCE = 'coterie.awaySince'; // the card shows what happened since then
const AWAY_MS = 600_000;
const BEAT_MS = 20_000;
const SHOWN = 6; // tasks and conversations each
const LENGTH = 80; // of a task's text
let summary = null;

export function start() {
  come();
  setInterval(beat, BEAT_MS);
  document.addEventListener('visibilitychange', () => (document.hidden ? note() : come()));
  addEventListener('pagehide', () => !document.hidden && note());
  addEventListener('storage', ({ key }) => key === SINCE && show());
  document.addEventListener('languagechange', draw);
  on('agents', draw);
}

const note = () => localStorage.setItem(SEEN, new Date(now()).toISOString());

/** Called while the page is visible. A machine that slept was away too. */
function beat() {
  if (!document.hidden) come();
}

function come() {
  if (document.hidden) return;
  const last = localStorage.getItem(SEEN);
  if (last && now() - Date.parse(last) >= AWAY_MS && !localStorage.getItem(SINCE)) localStorage.setItem(SINCE, last);
  const first = !summary;
  note();
  if (first) show();
}

/** Shows the card if one is due; otherwise removes it. */
async function show() {
  const since = localStorage.getItem(SINCE);
  if (!since) {
    summary = null;
    draw();
    return;
  }
  if (summary?.since === since) return;
  const seen = await query('/away', { since }).catch(() => null);
  if (localStorage.getItem(SINCE) !== since || !seen) return;
  const nothing = !seen.finished.length && !seen.failed.length && !seen.waiting.length && !seen.messages;
  if (nothing) return close();
  summary = { ...seen, since };
  draw();
}

function close() {
  localStorage.removeItem(SINCE);
  if (region('away').contains(document.activeElement)) document.getElementById('composer')?.focus();
  summary = null;
  draw();
}

function draw() {
  const shown = region('away').querySelector('.away'); // the region has other cards too
  if (!summary) {
    shown?.remove();
    return;
  }
  const wasOpen = shown?.querySelector('details')?.open ?? !small.matches;
  const { counts = {} } = summary;
  const sums = ['waiting', 'failed', 'finished'].map((name) => [name, counts[name] ?? summary[name].length]).filter(([, n]) => n).map(([name, n]) => t(`away_${name}`, { n }));
  if (summary.messages) sums.push(many('messages', summary.messages));
  const tasks = [...summary.waiting, ...summary.failed, ...summary.finished];
  const more = h('details', { class: 'away-more' }, h('summary', { text: sums.join(' · ') }),
    h('ul', { class: 'away-list' }, tasks.slice(0, SHOWN).map(taskItem), summary.threads.filter((one) => one.unread).slice(0, SHOWN).map(threadItem),
      h('li', {}, h('a', { href: '#/tasks', text: t('tasksAll') }))));
  more.open = wasOpen;
  const card = h('section', { class: 'banner away', 'aria-label': t('away'), 'data-testid': 'away' },
    h('div', { class: 'banner-text' }, h('h2', {}, t('away'), ' ', h('span', { class: 'meta', text: t('awaySince', { time: dayAndTime(summary.since) }) })), more),
    iconButton('close', t('awayClose'), { 'data-testid': 'away-close', onclick: close }));
  if (shown) shown.replaceWith(card);
  else region('away').prepend(card);
}

const taskItem = (task) => h('li', {}, stateTag(task.state), ' ', h('a', { href: taskPath(task.id), dir: 'auto', text: unmarked(task.text).slice(0, LENGTH) || t('noText') }), ' ', h('span', { class: 'meta', text: taskWords(task) }));

const threadItem = ({ agent, unread }) => h('li', {}, h('a', { href: agentPath(agent), dir: 'auto', text: nameOf(agent) }), ' ', h('span', { class: 'meta', text: t('unread', { n: unread }) }));
