// Delayed messages: by due time, with a countdown and a cancel button. Recurring ones can be paused and ended.

import { del, newId, patch, query, send } from '../api.js';
import { isInterval, planned } from '../composer.js';
import { button, empty, fill, flag, h, setText, sync } from '../dom.js';
import { dayAndTime, digits, recurrence, t } from '../i18n.js';
import { who } from '../message.js';
import { everySecond, keep, now, on, PERSON, plainText, state, touch } from '../state.js';
import { tooLate } from '../waiting.js';
import { busy, toggle, when } from './parts.js';

/** Ids of messages that an edited one replaces: not shown, so that no message is seen twice. */
const replaced = new Set();

/** In the inspector (`compact`): only those from or to the agent in `query`. */
export function render(root, { compact, query: asked }) {
  const agent = asked?.get('agent');
  const isShown = (one) => !replaced.has(one.id) && (!agent || one.from === agent || one.to === agent);
  const list = h('ul', { class: 'items', 'aria-label': t('delayed') });
  const rows = new Map();
  let onlyTimes = flag('onlyTimes');
  const more = h('div');

  const draw = () => {
    const due = [...state.delayed.values()].filter(isShown).sort((a, b) => (a.deliverAt < b.deliverAt ? -1 : 1));
    for (const id of rows.keys()) if (!state.delayed.has(id)) rows.delete(id);
    for (const message of due) if (rows.get(message.id)?.every !== (message.every ?? '')) rows.set(message.id, row(message));
    const focused = list.contains(document.activeElement);
    const resting = [...state.paused.values()].filter(isShown).map(pausedRow);
    sync(list, due.map((message) => rows.get(message.id).el), resting);
    const none = !due.length && !resting.length;
    if (focused && none) root.focus();
    sync(more, none ? (compact ? h('p', { class: 'meta' }, t('delayedNone')) : empty(t('delayedNone'))) : null);
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
  const load = () => Promise.all([compact || loadAll(), loadPaused()]).catch(() => {});
  load();
  const stops = [on(['delayed', 'agents'], draw), on('snapshot', load), everySecond(tick)];
  return () => stops.forEach((stop) => stop());
}

/** Loads all delayed messages. Needed after every snapshot, which has only the first ones. */
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

/** Loads the recurring messages that are paused; the others are among the delayed ones. */
async function loadPaused() {
  const found = new Map();
  for (let after; ; ) {
    const page = await query('/schedules', { after, limit: 200 });
    for (const item of page.items) if (item.state === 'paused') found.set(item.id, item);
    after = page.next;
    if (!after) break;
  }
  state.paused = found;
  touch('delayed');
}

const schedulePath = (id) => `/schedules/${encodeURIComponent(id)}`;
const messagePath = (id) => `/messages/${encodeURIComponent(id)}`;
/** Withdraws a delayed message, or ends the recurring message that it belongs to. */
const remove = (id, scheduleId) => del(scheduleId ? schedulePath(scheduleId) : messagePath(id));

/** Buttons that pause or resume, and end, a recurring message. */
function recurring(id, text, paused) {
  const turn = button({ class: 'text-btn', 'data-testid': paused ? 'schedule-resume' : 'schedule-pause', data: { of: `${id} turn` }, text: t(paused ? 'recurResume' : 'recurPause'),
    'aria-label': t(paused ? 'recurResumeThis' : 'recurPauseThis', { text }), onclick: () => busy(turn, () => patch(schedulePath(id), { paused: !paused })) });
  const end = button({ class: 'text-btn danger', 'data-testid': 'schedule-end', data: { of: `${id} end` }, text: t('recurEnd'), 'aria-label': t('recurEndThis', { text }),
    onclick: () => busy(end, () => del(schedulePath(id))) });
  return [turn, end];
}

const recurs = (every) => h('span', { class: 'tag', dir: 'auto', 'data-testid': 'every', text: t('recurs', { every: recurrence(every) }) });

function pausedRow(schedule) {
  return h(
    'li',
    { class: 'item delayed-item', 'data-testid': 'paused-schedule', data: { scheduleId: schedule.id, key: schedule.id } },
    h('p', { class: 'item-head', dir: 'auto', text: `${who(schedule.from)} → ${who(schedule.to)}` }),
    h('p', { class: 'item-text', dir: 'auto', text: plainText(schedule) || t('noText') }),
    h('p', { class: 'item-foot' }, h('span', { class: 'tag', text: t('paused') }), ' ', recurs(schedule.every), h('span', { class: 'item-acts' }, recurring(schedule.id, plainText(schedule), true))),
  );
}

/** Moves a scheduled message; a text or a recurrence that changed makes it a new one. */
async function edit(message) {
  const { askWhen } = await import('./send_later.js');
  const text = String(message.payload?.text ?? '');
  const mine = message.from === PERSON;
  const [, every, zone] = /^(.*?)(?: (UTC|[A-Za-z_]+\/\S+))?$/.exec(message.every ?? '') ?? [];
  let clientId = newId();
  const save = async (plan) => {
    const rewritten = mine && (plan.text !== text || Boolean(plan.every) !== Boolean(every)); // sent again, by the person
    const moved = plan.at && Date.parse(plan.at) !== Date.parse(message.deliverAt);
    // Other times of day begin with the first of them, unless the date was chosen, too.
    if (!moved && every && plan.every !== every && !isInterval(plan.every ?? '')) plan = { ...plan, at: null };
    if (!rewritten && plan.every !== every && every) return patch(schedulePath(message.scheduleId), planned(plan));
    if (!rewritten) return moved ? patch(messagePath(message.id), { delayMs: Math.max(0, Date.parse(plan.at) - now()) }) : null;
    replaced.add(message.id);
    try {
      // The old one is removed last, because the server may refuse the new one.
      const sent = await send({ clientId, to: message.to, payload: { ...message.payload, text: plan.text }, ...planned(plan.every === every && zone ? { ...plan, timeZone: zone } : plan) });
      await remove(message.id, message.scheduleId).catch(async (error) => {
        if (error.code === 'already_taken') {
          await remove(sent.messageId, sent.scheduleId);
          clientId = newId();
        }
        throw error;
      });
    } catch (error) {
      replaced.delete(message.id);
      touch('delayed');
      throw error;
    }
  };
  await askWhen({ title: t('whenEdit'), text, edits: mine, from: { at: message.deliverAt, every }, save });
}

function row(message) {
  const left = h('span', { class: 'countdown' });
  const at = when(message.deliverAt);
  const callOff = () => del(messagePath(message.id)).catch((error) => tooLate(error, 'delayedTooLate'));
  const cancel = button({ class: 'text-btn', text: t(message.every ? 'recurSkip' : 'cancel'), 'aria-label': t(message.every ? 'recurSkipThis' : 'delayedCancelThis', { text: plainText(message) }), onclick: () => busy(cancel, callOff) });
  const change = button({ class: 'text-btn', text: t('edit'), 'data-testid': 'delayed-edit', 'aria-label': t('editThis', { name: plainText(message) || t('noText') }), onclick: () => edit(message) });
  const el = h(
    'li',
    { class: 'item delayed-item', data: { messageId: message.id, key: message.id + message.every } },
    h('p', { class: 'item-head', dir: 'auto', text: `${who(message.from)} → ${who(message.to)}` }),
    h('p', { class: 'item-text', dir: 'auto', text: plainText(message) || t('noText') }),
    h('p', { class: 'item-foot' }, left, ' ', at, message.every && recurs(message.every),
      h('span', { class: 'item-acts' }, cancel, change, message.scheduleId && recurring(message.scheduleId, plainText(message), false))),
  );
  return {
    el,
    every: message.every ?? '',
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
