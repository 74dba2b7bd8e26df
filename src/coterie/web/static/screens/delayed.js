// Delayed messages: by due time, with a countdown and a cancel button.

import { del, query } from '../api.js';
import { button, empty, fill, flag, h, setText } from '../dom.js';
import { dayAndTime, digits, t } from '../i18n.js';
import { who } from '../message.js';
import { everySecond, keep, now, on, plainText, state, touch } from '../state.js';
import { tooLate } from '../waiting.js';
import { busy, toggle, when } from './parts.js';

export function render(root, { compact }) {
  const list = h('ul', { class: 'items', 'aria-label': t('delayed') });
  const rows = new Map();
  let onlyTimes = flag('onlyTimes');
  const more = h('div');

  const draw = () => {
    const due = [...state.delayed.values()].sort((a, b) => (a.deliverAt < b.deliverAt ? -1 : 1));
    for (const id of rows.keys()) if (!state.delayed.has(id)) rows.delete(id);
    for (const message of due) if (!rows.has(message.id)) rows.set(message.id, row(message));
    const focused = list.contains(document.activeElement);
    fill(list, due.map((message) => rows.get(message.id).el));
    if (focused && !due.length) root.focus();
    fill(more, due.length ? null : empty(t('delayedNone')));
    tick();
  };
  const tick = () => {
    for (const one of rows.values()) one.tick(onlyTimes);
  };

  fill(
    root,
    toggle(t('delayedOnlyTimes'), onlyTimes, (wanted) => {
      onlyTimes = wanted;
      flag('onlyTimes', wanted);
      tick();
    }),
    list,
    more,
  );
  root.tabIndex = -1;
  draw();
  if (!compact) loadAll().catch(() => {});
  const stops = [on(['delayed', 'snapshot', 'agents'], draw), everySecond(tick)];
  return () => stops.forEach((stop) => stop());
}

/** Loads all delayed messages; the snapshot has only the first ones. */
async function loadAll() {
  for (let after; ; ) {
    const page = await query('/delayed', { after, limit: 200 });
    for (const item of page.items) {
      // Skip messages that were delivered meanwhile.
      if ((state.messages.get(item.id) ?? item).state === 'delayed') state.delayed.set(item.id, keep(item));
    }
    touch('delayed');
    after = page.next;
    if (!after) return;
  }
}

function row(message) {
  const left = h('span', { class: 'countdown' });
  const at = when(message.deliverAt);
  const callOff = () => del(`/messages/${encodeURIComponent(message.id)}`).catch((error) => tooLate(error, 'delayedTooLate'));
  const cancel = button({ class: 'text-btn', text: t('cancel'), 'aria-label': t('delayedCancelThis', { text: plainText(message) }), onclick: () => busy(cancel, callOff) });
  const el = h(
    'li',
    { class: 'item delayed-item', data: { messageId: message.id } },
    h('p', { class: 'item-head', dir: 'auto', text: `${who(message.from)} → ${who(message.to)}` }),
    h('p', { class: 'item-text', dir: 'auto', text: plainText(message) || t('noText') }),
    h('p', { class: 'item-foot' }, left, ' ', at, cancel),
  );
  return {
    el,
    tick(onlyTimes) {
      at.dateTime = message.deliverAt;
      setText(at, dayAndTime(message.deliverAt));
      const shown = secondsTo(message.deliverAt);
      setText(left, shown <= 0 ? t('delayedDueNow') : onlyTimes ? '' : countdown(shown));
    },
  };
}

/** due time -> seconds shown, the same wherever it is counted down. */
const counted = new Map();
const leftTo = (due) => (Date.parse(due) - now()) / 1000;

function secondsTo(due) {
  if (!counted.has(due)) counted.set(due, Math.ceil(leftTo(due)));
  return counted.get(due);
}

// Timers are inexact: count down by whole seconds, so that none is shown twice or skipped.
everySecond(() => {
  for (const [due, shown] of counted) {
    const left = leftTo(due);
    const next = shown - 1;
    if (left < -1) counted.delete(due);
    else counted.set(due, left > next - 1.3 && left <= next + 0.3 ? next : Math.ceil(left));
  }
});

function countdown(seconds) {
  const days = Math.floor(seconds / 86400);
  return (days ? `${t('days', { n: days })} ` : '') + digits(seconds % 86400);
}
